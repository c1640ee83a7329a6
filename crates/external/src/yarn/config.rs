//! Configuration of a YARN provider: the JSON of Linkis's provider table.
//!
//! Parses and validates JSON, and formats it with and without secrets. Errors name a key and never repeat a value.
//! Caller: the parent module.

use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Map, Value};

use crate::{
    ExternalCluster, ServerAddress,
    check::{self, wrong},
};
use rm_model::{external::CheckRules, name::FieldError};

use super::{CapacityMode, Yarn, fetch::ActiveAddress};

/// Maximum number of addresses, and maximum length of user and password in bytes.
const ADDRESSES_MAX: usize = 8;
const CREDENTIAL_BYTES_MAX: usize = 1024;

/// Keys of Linkis without effect: the responses reveal the release.
const UNUSED: [&str; 4] = ["hadoopVersion", "principalName", "keytabPath", "krb5Path"];

/// Reason why Kerberos is not supported.
const NO_KERBEROS: &str = "is not supported, because it needs a C library and key files on each instance; set it to \
    false and name an address that accepts a user and a password, such as that of a gateway (Apache Knox)";

/// Configuration of a provider.
#[derive(Debug)]
pub(super) struct YarnConfig {
    /// Addresses of the ResourceManagers.
    pub addresses: Vec<ServerAddress>,
    /// Credentials; `None` for no authentication.
    pub login: Option<YarnLogin>,
    /// Which capacity of a queue counts.
    pub capacity: CapacityMode,
    /// Rules by which requests are checked against the queues.
    pub rules: CheckRules,
    /// Keys without effect, which are stored and returned.
    unused: Map<String, Value>,
}

/// User and password.
#[derive(Debug)]
pub(super) struct YarnLogin {
    /// User.
    pub user: String,
    /// Password.
    pub password: SecretString,
}

/// Parses a configuration. An omitted password is copied from `before`, if it belongs to the same user and addresses.
///
/// # Errors
/// Names the faulty key.
pub fn read(json: &str, before: Option<&str>) -> Result<Box<dyn ExternalCluster>, FieldError> {
    let before = before.and_then(|before| parse(before, None).ok());
    let config = parse(json, before.as_ref())?;
    Ok(Box::new(Yarn { config, active: ActiveAddress::default() }))
}

fn parse(json: &str, before: Option<&YarnConfig>) -> Result<YarnConfig, FieldError> {
    let mut keys = check::keys(json)?;
    let addresses = addresses(text(&mut keys, "rmWebAddress")?.as_deref())?;
    if flag(&mut keys, "kerberosEnable")? {
        return Err(wrong("kerberosEnable", NO_KERBEROS));
    }
    let (enabled, user, password) =
        (flag(&mut keys, "authorEnable")?, text(&mut keys, "user")?, text(&mut keys, "pwd")?);
    let login = match enabled {
        true => Some(login(user.unwrap_or_default(), password, before.filter(|before| before.addresses == addresses))?),
        // Linkis always writes both keys.
        false => None,
    };
    let capacity = match text(&mut keys, "queueCapacity")?.as_deref() {
        None | Some("maximum") => CapacityMode::Maximum,
        Some("guaranteed") => CapacityMode::Guaranteed,
        Some(_) => return Err(wrong("queueCapacity", "must be \"maximum\" or \"guaranteed\"")),
    };
    let rules = check::read(&mut keys)?;
    let mut unused = Map::new();
    for key in UNUSED {
        if let Some(value) = text(&mut keys, key)? {
            unused.insert(key.to_owned(), value.into());
        }
    }
    check::nothing_else(
        &keys,
        "rmWebAddress, authorEnable, user, pwd, kerberosEnable, queueCapacity, whenDown, maxAge, lastKnownFor, refreshInterval, and, \
         without a meaning here, hadoopVersion, principalName, keytabPath and krb5Path",
    )?;
    Ok(YarnConfig { addresses, login, capacity, rules, unused })
}

fn text(keys: &mut Map<String, Value>, key: &str) -> Result<Option<String>, FieldError> {
    check::text(keys, key, CREDENTIAL_BYTES_MAX * ADDRESSES_MAX)
}

/// Removes a flag; false if the key is missing.
fn flag(keys: &mut Map<String, Value>, key: &str) -> Result<bool, FieldError> {
    match keys.remove(key) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(flag),
        Some(_) => Err(wrong(key, "must be true or false")),
    }
}

fn addresses(text: Option<&str>) -> Result<Vec<ServerAddress>, FieldError> {
    let text = text.ok_or_else(|| wrong("rmWebAddress", "is required, e.g. \"http://rm1:8088;http://rm2:8088\""))?;
    let parts = text.split(';').map(str::trim).filter(|part| !part.is_empty());
    let addresses: Vec<_> =
        parts.map(ServerAddress::parse).collect::<Result<_, _>>().map_err(|problem| wrong("rmWebAddress", problem))?;
    match addresses.len() {
        0 => Err(wrong("rmWebAddress", "is empty; name at least one address")),
        1..=ADDRESSES_MAX => Ok(addresses),
        many => Err(wrong("rmWebAddress", format!("names {many} addresses; at most {ADDRESSES_MAX} are allowed"))),
    }
}

/// Parses the credentials. `before` is the configuration of the same addresses: a password is never sent to other
/// addresses than it was given for.
fn login(user: String, password: Option<String>, before: Option<&YarnConfig>) -> Result<YarnLogin, FieldError> {
    if user.is_empty() || user.contains(':') || user.chars().any(char::is_control) {
        return Err(wrong("user", "must be a name without a colon, because authorEnable is true"));
    }
    let kept = before.and_then(|before| before.login.as_ref()).filter(|before| before.user == user);
    let password = match password {
        Some(password) => SecretString::from(password),
        None => {
            let missing = || wrong("pwd", "is required again for another user or other addresses");
            kept.ok_or_else(missing)?.password.clone()
        }
    };
    let bytes = [user.len(), password.expose_secret().len()];
    if bytes.into_iter().any(|bytes| bytes > CREDENTIAL_BYTES_MAX) {
        return Err(wrong("pwd", format!("and user must each have at most {CREDENTIAL_BYTES_MAX} bytes")));
    }
    Ok(YarnLogin { user, password })
}

impl YarnConfig {
    fn keys(&self) -> Map<String, Value> {
        let mut keys = self.unused.clone();
        let addresses: Vec<_> = self.addresses.iter().map(ServerAddress::as_str).collect();
        keys.insert("rmWebAddress".into(), addresses.join(";").into());
        keys.insert("authorEnable".into(), self.login.is_some().into());
        if let Some(login) = &self.login {
            keys.insert("user".into(), login.user.clone().into());
        }
        keys.insert(
            "queueCapacity".into(),
            match self.capacity {
                CapacityMode::Maximum => "maximum".into(),
                CapacityMode::Guaranteed => "guaranteed".into(),
            },
        );
        check::write(&self.rules, &mut keys);
        keys
    }

    /// Returns the whole configuration as JSON, secrets included.
    pub fn stored(&self) -> SecretString {
        let mut keys = self.keys();
        if let Some(login) = &self.login {
            keys.insert("pwd".into(), login.password.expose_secret().into());
        }
        Value::Object(keys).to_string().into()
    }

    /// Returns the configuration as JSON without the password.
    pub fn shown(&self) -> String {
        Value::Object(self.keys()).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "gr8-s3cret";

    /// The first row of Linkis's own table.
    const LINKIS: &str = r#"{"rmWebAddress": "http://127.0.0.1:8088", "hadoopVersion": "3.3.4", "authorEnable": false, "user": "hadoop",
        "pwd": "gr8-s3cret", "kerberosEnable": false, "principalName": "p@R", "keytabPath": "/k", "krb5Path": "/k5"}"#;

    fn with_login(addresses: &str, pwd: &str) -> String {
        format!(r#"{{"rmWebAddress": "{addresses}", "authorEnable": true, "user": "hadoop"{pwd}}}"#)
    }

    fn error(json: &str) -> (String, String) {
        let FieldError { field, problem } = read(json, None).unwrap_err();
        assert!(!problem.contains(SECRET), "{problem}");
        (field, problem)
    }

    #[test]
    fn linkis_yarn_row_is_accepted() {
        let config = parse(LINKIS, None).unwrap();
        assert_eq!(config.addresses.iter().map(ServerAddress::as_str).collect::<Vec<_>>(), ["http://127.0.0.1:8088"]);
        assert!(config.login.is_none() && config.capacity == CapacityMode::Maximum);
        assert!(!config.stored().expose_secret().contains(SECRET), "an unused password is not stored");
        assert!(config.shown().contains(r#""hadoopVersion":"3.3.4""#));
        let two = parse(r#"{"rmWebAddress": " http://a:8088/; https://b:8090 ;"}"#, None).unwrap();
        assert_eq!(
            two.addresses.iter().map(ServerAddress::as_str).collect::<Vec<_>>(),
            ["http://a:8088", "https://b:8090"]
        );
    }

    #[test]
    fn linkis_yarn_addresses_in_any_form_are_accepted() {
        for row in [
            "{\r\n\"rmWebAddress\": \"http://127.0.0.1:8088\",\r\n\"hadoopVersion\": \"2.7.2\",\r\n\"authorEnable\": false\r\n}",
            r#"{"rmWebAddress": "http://rm1", "hadoopVersion": null, "authorEnable": null, "user": null, "pwd": null}"#,
            r#"{"rmWebAddress": "http://rm1;\r\nhttp://rm2"}"#,
        ] {
            assert!(parse(row, None).is_ok(), "{row}");
        }
        for address in ["http://127.0.0.1:8443/gateway/default/yarn", "http://[::1]:8088", "HTTP://127.0.0.1:8088"] {
            let config = parse(&format!(r#"{{"rmWebAddress": "{address}"}}"#), None).unwrap();
            assert_eq!(config.addresses[0].as_str().to_lowercase(), address.to_lowercase());
        }
    }

    #[test]
    fn yarn_config_error_names_key() {
        for (json, key) in [
            ("gr8-s3cret", "config"),
            ("[]", "config"),
            ("{}", "config.rmWebAddress"),
            (r#"{"rmWebAddress": 1}"#, "config.rmWebAddress"),
            (r#"{"rmWebAddress": ";"}"#, "config.rmWebAddress"),
            (r#"{"rmWebAddress": "rm1:8088"}"#, "config.rmWebAddress"),
            (r#"{"rmWebAddress": "ftp://rm1"}"#, "config.rmWebAddress"),
            (r#"{"rmWebAddress": "http://rm1:1,http://rm2:1"}"#, "config.rmWebAddress"),
            (r#"{"rmWebAddress": "http://rm1", "hadoopVersion": 2.7}"#, "config.hadoopVersion"),
            (r#"{"rmWebAddress": "http://u:gr8-s3cret@rm1"}"#, "config.rmWebAddress"),
            (r#"{"rmWebAddress": "http://rm1?x=gr8-s3cret"}"#, "config.rmWebAddress"),
            (r#"{"rmWebAddress": "http://rm1", "rmWebAdress": 1}"#, "config.rmWebAdress"),
            (r#"{"rmWebAddress": "http://rm1", "authorEnable": "yes"}"#, "config.authorEnable"),
            (r#"{"rmWebAddress": "http://rm1", "authorEnable": true}"#, "config.user"),
            (r#"{"rmWebAddress": "http://rm1", "authorEnable": true, "user": "a:b", "pwd": "x"}"#, "config.user"),
            (r#"{"rmWebAddress": "http://rm1", "authorEnable": true, "user": "a"}"#, "config.pwd"),
            (r#"{"rmWebAddress": "http://rm1", "queueCapacity": "all"}"#, "config.queueCapacity"),
        ] {
            assert_eq!(error(json).0, key, "{json}");
        }
        let (field, problem) = error(r#"{"rmWebAddress": "http://rm1", "kerberosEnable": true}"#);
        assert_eq!(field, "config.kerberosEnable");
        assert!(problem.contains("Knox"), "{problem}");
        let nine = ["http://rm1"; 9].join(";");
        assert!(error(&format!(r#"{{"rmWebAddress": "{nine}"}}"#)).1.contains("at most 8"));
    }

    #[test]
    fn password_is_hidden_and_reused_only_for_same_user_and_addresses() {
        let given = with_login("http://rm1:8088", r#", "pwd": "gr8-s3cret""#);
        let first = read(&given, None).unwrap();
        assert!(!first.shown().contains(SECRET) && !format!("{first:?}").contains(SECRET));
        let stored = first.stored();
        assert!(stored.expose_secret().contains(SECRET) && !format!("{stored:?}").contains(SECRET));
        let before = Some(stored.expose_secret());
        let again = read(&with_login("http://rm1:8088", ""), before).unwrap();
        assert_eq!(again.stored().expose_secret(), stored.expose_secret());
        for other in [
            with_login("http://rm2:8088", ""),
            with_login("http://rm1:8088;http://rm2:8088", ""),
            with_login("http://rm1:8088", "").replace("hadoop", "root"),
        ] {
            assert_eq!(read(&other, before).unwrap_err().field, "config.pwd", "{other}");
        }
    }
}
