//! Names in client certificates: the EMs that a certificate speaks for.
//!
//! A URI name `linkis-rm://ecm/<application>/<host>` names the EMs of one application on one machine. Without such a
//! URI, each DNS name is a machine whose EMs the certificate speaks for. The functions here do not verify a
//! certificate. Caller: the edge.

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

use rm_model::{
    access::{EmPattern, Rights},
    name::Name,
};

/// Prefix of a URI name before the application and the host.
const URI: &str = "linkis-rm://ecm/";

/// Maximum number of names that are read of a certificate.
const NAMES_MAX: usize = 64;

/// Returns the principal of a verified certificate and its rights; `None` if it names no EM.
pub fn ecm(certificate: &CertificateDer<'_>) -> Option<(Name, Rights)> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    let uris: Vec<&str> = certificate.valid_uri_names().take(NAMES_MAX).collect();
    let hosts: Vec<&str> = certificate.valid_dns_names().take(NAMES_MAX).collect();
    let ems = ems(&uris, &hosts);
    let name = Name::parse("certificate", &format!("ecm/{}", ems.first()?)).ok()?;
    Some((name, Rights::of_ecm(ems)))
}

/// Returns the EMs that the names mean. A malformed URI of the service names no EM, and DNS names then do not
/// count.
fn ems(uris: &[&str], hosts: &[&str]) -> Vec<EmPattern> {
    let named: Vec<&str> = uris.iter().filter_map(|uri| uri.strip_prefix(URI)).collect();
    match named.is_empty() {
        false => named.into_iter().filter_map(of_uri).collect(),
        // A wildcard such as "*.example.com" names no single machine.
        true => hosts.iter().filter(|host| !host.contains('*')).map(|host| EmPattern::of_host(None, *host)).collect(),
    }
}

fn of_uri(rest: &str) -> Option<EmPattern> {
    let (application, host) = rest.split_once('/')?;
    let (application, host) = (decoded(application)?, decoded(host)?);
    let is_name = |text: &str| Name::parse("certificate", text).is_ok() && text != "*";
    (is_name(&application) && is_name(&host)).then(|| EmPattern::of_host(Some(application), host))
}

/// Decodes percent-encoded bytes such as `%2F`.
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

    fn names(uris: &[&str], hosts: &[&str]) -> Vec<String> {
        ems(uris, hosts).iter().map(EmPattern::to_string).collect()
    }

    #[test]
    fn certificate_uri_precedes_host_names() {
        let own = "linkis-rm://ecm/linkis-cg-engineconnmanager/host1";
        assert_eq!(names(&[own], &["host2"]), ["linkis-cg-engineconnmanager/host1"]);
        assert_eq!(names(&["spiffe://x/y"], &["host2", "*.example.com", "*"]), ["*/host2"]);
        assert_eq!(names(&["linkis-rm://ecm/a%2fb/h%C3%BC"], &[]), ["a/b/hü"]);
        for wrong in ["", "a", "a/", "/h", "*/h", "a/*", "a/%2A", "a/%", "a/%f", "a/%ff", "a/%0a"] {
            assert_eq!(names(&[&format!("linkis-rm://ecm/{wrong}")], &["host2"]), [""; 0], "{wrong}");
        }
    }
}
