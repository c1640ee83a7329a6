//! Settings of the trace export, from the standard environment variables of OpenTelemetry.
//!
//! Only variables that this program acts on, or that the libraries would ignore silently, are parsed here. The
//! libraries read headers, compression, span limits and resource attributes themselves. Caller: `config` of the program.

use std::{fmt, fs, time::Duration};

use tonic::transport::{Certificate, ClientTlsConfig, Identity, Uri};

/// Settings of the trace export. `Debug` shows no key.
#[derive(Clone)]
pub struct TraceSettings {
    /// URL of a collector with OTLP over gRPC.
    pub(super) endpoint: String,
    /// Trusted certificates and client certificate.
    pub(super) tls: ClientTlsConfig,
    /// Name of the service in its resource.
    pub(super) service_name: Option<String>,
    /// Maximum number of queued spans; further ones are dropped.
    pub(super) queue_max: usize,
    /// Maximum number of spans per export.
    pub(super) batch_max: usize,
    /// Maximum time that a span waits for further ones.
    pub(super) delay: Duration,
    /// Timeout of an export.
    pub(super) timeout: Duration,
}

impl fmt::Debug for TraceSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// A setting, or the text of its fault.
type SettingResult<T> = Result<T, String>;

/// Reader of environment variables. An empty variable counts as unset.
struct EnvironmentValue<R>(R);

impl<R: Fn(&str) -> Option<String>> EnvironmentValue<R> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// Returns the value and name of a variable for traces, or else of the one for all signals.
    fn of_traces(&self, what: &str) -> Option<(String, String)> {
        let names = [format!("OTEL_EXPORTER_OTLP_TRACES_{what}"), format!("OTEL_EXPORTER_OTLP_{what}")];
        names.into_iter().find_map(|name| Some((self.get(&name)?, name)))
    }

    fn number(&self, name: &str, default: usize) -> SettingResult<usize> {
        let Some(text) = self.get(name) else { return Ok(default) };
        let number = text.parse().ok().filter(|number| (1..=NUMBER_MAX).contains(number));
        number.ok_or_else(|| format!("{name}: {text:?} is not a number from 1 to {NUMBER_MAX}"))
    }

    fn milliseconds(&self, name: &str, default: usize) -> SettingResult<Duration> {
        let number = self.number(name, default)?;
        Ok(Duration::from_millis(u64::try_from(number).unwrap_or(u64::MAX)))
    }

    fn file(&self, what: &str) -> SettingResult<Option<Vec<u8>>> {
        let Some((path, name)) = self.of_traces(what) else { return Ok(None) };
        fs::read(&path).map(Some).map_err(|error| format!("{name}: {path} cannot be read: {error}"))
    }
}

/// Maximum value of a number of spans or milliseconds.
const NUMBER_MAX: usize = 1_000_000;

const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

impl TraceSettings {
    /// Reads the settings. `None` if no traces are exported.
    ///
    /// # Errors
    /// The name and fault of a variable. Otherwise spans would be lost silently, or far more would be recorded than
    /// intended.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> SettingResult<Option<Self>> {
        let environment = EnvironmentValue(variable);
        let exporter = environment.get("OTEL_TRACES_EXPORTER");
        let is_off = environment.get("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true"));
        let endpoint = environment.of_traces("ENDPOINT").filter(|_| !is_off && exporter.as_deref() != Some("none"));
        let Some((endpoint, name)) = endpoint else { return Ok(None) };
        if let Some(exporter) = exporter.filter(|exporter| exporter != "otlp") {
            return Err(format!("OTEL_TRACES_EXPORTER: {exporter:?} is unknown; set otlp or none"));
        }
        if let Some((protocol, name)) = environment.of_traces("PROTOCOL").filter(|(protocol, _)| protocol != "grpc") {
            return Err(format!(
                "{name}: {protocol:?} is not supported; set grpc, and the endpoint to the collector's gRPC port, \
                    usually 4317"
            ));
        }
        let uri = endpoint.parse::<Uri>().ok();
        if !uri.is_some_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()) {
            return Err(format!("{name}: {endpoint:?} is not a URL; for example http://127.0.0.1:4317"));
        }
        check_sampler(&environment)?;
        Ok(Some(Self {
            endpoint,
            tls: tls(&environment)?,
            service_name: environment.get("OTEL_SERVICE_NAME"),
            queue_max: environment.number("OTEL_BSP_MAX_QUEUE_SIZE", 2048)?,
            batch_max: environment.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)?,
            delay: environment.milliseconds("OTEL_BSP_SCHEDULE_DELAY", 5000)?,
            timeout: environment.milliseconds("OTEL_BSP_EXPORT_TIMEOUT", 30_000)?,
        }))
    }
}

/// Checks the sampler variables. The library, which creates the sampler, would record everything for an unknown name.
fn check_sampler(environment: &EnvironmentValue<impl Fn(&str) -> Option<String>>) -> SettingResult<()> {
    let Some(sampler) = environment.get("OTEL_TRACES_SAMPLER") else { return Ok(()) };
    if !SAMPLERS.contains(&sampler.as_str()) {
        return Err(format!("OTEL_TRACES_SAMPLER: {sampler:?} is unknown; set one of {}", SAMPLERS.join(", ")));
    }
    let argument = environment.get("OTEL_TRACES_SAMPLER_ARG");
    let is_ratio = argument.as_ref().is_some_and(|text| text.parse().is_ok_and(|ratio| (0.0..=1.0).contains(&ratio)));
    if sampler.ends_with("traceidratio") && !is_ratio {
        let argument = argument.unwrap_or_default();
        return Err(format!(
            "OTEL_TRACES_SAMPLER_ARG: {argument:?} is not a number from 0 to 1, which {sampler} needs"
        ));
    }
    Ok(())
}

/// Returns the TLS settings. Trusts the public certificate authorities unless a certificate is configured.
fn tls(environment: &EnvironmentValue<impl Fn(&str) -> Option<String>>) -> SettingResult<ClientTlsConfig> {
    let tls = match environment.file("CERTIFICATE")? {
        Some(ca) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)),
        None => ClientTlsConfig::new().with_enabled_roots(),
    };
    match (environment.file("CLIENT_CERTIFICATE")?, environment.file("CLIENT_KEY")?) {
        (Some(certificate), Some(key)) => Ok(tls.identity(Identity::from_pem(certificate, key))),
        (None, None) => Ok(tls),
        _ => {
            Err("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY: set both or neither"
                .to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> SettingResult<Option<TraceSettings>> {
        TraceSettings::read(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    const ON: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");

    #[test]
    fn traces_without_endpoint_or_exporter_are_off() {
        for off in [
            &[][..],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")],
            &[ON, ("OTEL_SDK_DISABLED", "TRUE")],
            &[ON, ("OTEL_TRACES_EXPORTER", "none"), ("OTEL_TRACES_SAMPLER", "odd")],
            // A protocol without an endpoint has no effect and is no reason to fail.
            &[("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")],
        ] {
            assert!(read(off).unwrap().is_none(), "{off:?}");
        }
        let settings = read(&[ON]).unwrap().unwrap();
        assert_eq!((settings.queue_max, settings.batch_max, settings.delay.as_secs()), (2048, 512, 5));
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://traces:4317");
        assert_eq!(read(&[ON, own]).unwrap().unwrap().endpoint, "https://traces:4317");
    }

    #[test]
    fn trace_setting_without_support_is_refused() {
        for (name, wrong, cause) in [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector", "for example http://127.0.0.1:4317"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "set grpc"),
            ("OTEL_TRACES_EXPORTER", "zipkin", "set otlp"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote", "set one of always_on"),
            ("OTEL_TRACES_SAMPLER", "traceidratio", "OTEL_TRACES_SAMPLER_ARG: \"\" is not a number"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "from 1 to"),
            ("OTEL_BSP_SCHEDULE_DELAY", "soon", "from 1 to"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/at/all", "cannot be read"),
        ] {
            let mistake = read(&[(name, wrong), ON]).unwrap_err();
            assert!(mistake.contains(name) && mistake.contains(cause), "{mistake}");
        }
        let ratio = [ON, ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "0.1")];
        assert!(read(&ratio).unwrap().is_some());
    }
}
