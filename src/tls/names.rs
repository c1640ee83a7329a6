//! Who a caller's certificate is for, by its alternative names: `linkis-rm://ecm/<application>/<host>`, or where there is none, its
//! DNS names, each a host whose EMs it speaks for.

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

use crate::domain::{
    access::{EmPattern, Rights},
    name::Name,
};

/// What stands before the application and the host.
const URI: &str = "linkis-rm://ecm/";

/// How many names of a certificate are read.
const NAMES_MAX: usize = 64;

/// Whom a certificate is for, as the history names it, and what that may do; `None` if it names no EM. Whether it is to be believed
/// has to be known before.
pub fn ecm(certificate: &CertificateDer<'_>) -> Option<(Name, Rights)> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    let uris: Vec<&str> = certificate.valid_uri_names().take(NAMES_MAX).collect();
    let hosts: Vec<&str> = certificate.valid_dns_names().take(NAMES_MAX).collect();
    let ems = ems(&uris, &hosts);
    let name = Name::parse("certificate", &format!("ecm/{}", ems.first()?)).ok()?;
    Some((name, Rights::of_ecm(ems)))
}

/// A name that has the service's form and is not understood is for nobody, and the host names do not count then.
fn ems(uris: &[&str], hosts: &[&str]) -> Vec<EmPattern> {
    let named: Vec<&str> = uris.iter().filter_map(|uri| uri.strip_prefix(URI)).collect();
    match named.is_empty() {
        false => named.into_iter().filter_map(of_uri).collect(),
        // "*.example.com" is for no host, and for every one.
        true => hosts.iter().filter(|host| !host.contains('*')).map(|host| EmPattern::of_host(None, *host)).collect(),
    }
}

fn of_uri(rest: &str) -> Option<EmPattern> {
    let (application, host) = rest.split_once('/')?;
    let (application, host) = (decoded(application)?, decoded(host)?);
    let is_name = |text: &str| Name::parse("certificate", text).is_ok() && text != "*";
    (is_name(&application) && is_name(&host)).then(|| EmPattern::of_host(Some(application), host))
}

/// What `%2F` and the like stand for.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let mut digit = || char::from(rest.next()?).to_digit(16);
        let byte = match byte {
            b'%' => u8::try_from(digit()? * 16 + digit()?).ok()?,
            byte => byte,
        };
        bytes.push(byte);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(uris: &[&str], hosts: &[&str]) -> Vec<String> {
        ems(uris, hosts).iter().map(EmPattern::to_string).collect()
    }

    #[test]
    fn a_uri_counts_before_host_names_and_a_wrong_one_for_nothing() {
        let own = "linkis-rm://ecm/linkis-cg-engineconnmanager/host1";
        assert_eq!(told(&[own], &["host2"]), ["linkis-cg-engineconnmanager/host1"]);
        assert_eq!(told(&["spiffe://x/y"], &["host2", "*.example.com", "*"]), ["*/host2"]);
        assert_eq!(told(&["linkis-rm://ecm/a%2fb/h%C3%BC"], &[]), ["a/b/hü"]);
        for wrong in ["", "a", "a/", "/h", "*/h", "a/*", "a/%2A", "a/%", "a/%f", "a/%ff", "a/%0a"] {
            assert_eq!(told(&[&format!("linkis-rm://ecm/{wrong}")], &["host2"]), [""; 0], "{wrong}");
        }
    }
}
