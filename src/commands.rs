//! The commands beside serving: they ask a running service, and print what it answers.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Args, Subcommand};
use tonic::Code;

use crate::{
    client::{ClientError, ClientSettings, Identity, RmClient, Tls},
    domain::{
        audit::{AuditReport, Difference, Differences, Repaired},
        resource::Dimension,
    },
};

/// Something differs, or could not be repaired.
const EXIT_DIFFERENCES: u8 = 1;

/// The service did not answer.
const EXIT_NO_ANSWER: u8 = 2;

/// How long an answer may take: an audit reads everything.
const TIMEOUT: Duration = Duration::from_secs(600);

/// How often it is asked: somebody waits to hear that nobody answers.
const ATTEMPTS: u32 = 3;

/// What to do other than to serve.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Compares every counter with what the tickets say, while the service runs. Ends with 0 if nothing differs, 1 if something
    /// does, 2 if the service does not answer.
    Audit(Service),
    /// Makes every counter what the tickets say, while the service runs. Ends with 0 if all is in order then, 1 if something could
    /// not be repaired, 2 if the service does not answer.
    Repair(Service),
}

/// Which service to ask.
#[derive(Debug, Clone, Args)]
pub struct Service {
    /// Where it serves gRPC: HOST:PORT, https://HOST:PORT or unix:/PATH; several with commas, of which one that serves is asked.
    #[arg(long, env = "LINKIS_RM_ADDRESS", default_value = "127.0.0.1:50051", value_name = "ADDRESS")]
    address: String,

    /// The certificates, as PEM, of those who may vouch for a service at https. Without it, those whom browsers trust.
    #[arg(long, env = "LINKIS_RM_SERVICE_CA", value_name = "FILE")]
    ca: Option<PathBuf>,

    /// The certificate, as PEM, that shows who asks.
    #[arg(long, env = "LINKIS_RM_SERVICE_CERT", value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,

    /// The key of the certificate, as PEM.
    #[arg(long, env = "LINKIS_RM_SERVICE_KEY", value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,

    /// A file with the token that says who asks.
    #[arg(long, env = "LINKIS_RM_SERVICE_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl Command {
    /// Asks the service, prints its answer, and says how the process ends.
    pub async fn run(self) -> ExitCode {
        let answer = match &self {
            Self::Audit(service) => service.audit().await,
            Self::Repair(service) => service.repair().await,
        };
        match answer {
            Ok((text, is_in_order)) => {
                // Whoever has stopped reading still gets the exit code.
                let _ = std::io::stdout().write_all(text.as_bytes());
                if is_in_order { ExitCode::SUCCESS } else { ExitCode::from(EXIT_DIFFERENCES) }
            }
            Err(error) => {
                eprintln!("linkis-rm: {error}{}", self.service().advice(&error));
                ExitCode::from(EXIT_NO_ANSWER)
            }
        }
    }

    fn service(&self) -> &Service {
        match self {
            Self::Audit(service) | Self::Repair(service) => service,
        }
    }
}

impl Service {
    /// Of several addresses, one that does not answer is passed over.
    fn client(&self) -> Result<RmClient, ClientError> {
        let identity = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => Some(Identity { certificates: read("--cert", cert)?, key: read("--key", key)? }),
            _ => None,
        };
        let tls = Tls { ca: self.ca.as_deref().map(|file| read("--ca", file)).transpose()?, identity };
        let token = self.token_file.as_deref().map(|file| read("--token-file", file)).transpose()?;
        let token = token.map(|token| String::from_utf8_lossy(&token).trim().to_owned());
        let settings = ClientSettings { attempts: ATTEMPTS, tls, token, ..ClientSettings::new(TIMEOUT) };
        RmClient::with(&self.address, &settings)
    }

    async fn audit(&self) -> Result<(String, bool), ClientError> {
        let report = self.client()?.audit().await?;
        Ok((report_text(&report), report.differences.is_empty()))
    }

    async fn repair(&self) -> Result<(String, bool), ClientError> {
        let done = self.client()?.repair().await?;
        Ok((repaired_text(&done), done.remaining.is_empty()))
    }

    /// What to type next.
    fn advice(&self, error: &ClientError) -> String {
        let address = &self.address;
        match error.code() {
            Some(Code::Unavailable) if error.reason().is_none() => {
                format!("\nNo service answers at {address}. Start one with linkis-rm, or name another with --address.")
            }
            Some(Code::Unimplemented) => format!("\nThe service at {address} is an older one. Update it."),
            Some(_) => format!("\nThe service at {address} failed. Its log says why; then type the same again."),
            None if matches!(error, ClientError::Secret(_)) => String::new(),
            None => "\nName the service with --address, e.g. --address 127.0.0.1:50051.".to_owned(),
        }
    }
}

/// A file that a setting names.
fn read(setting: &str, file: &Path) -> Result<Vec<u8>, ClientError> {
    std::fs::read(file)
        .map_err(|error| ClientError::Secret(format!("{setting}: {} cannot be read: {error}", file.display())))
}

fn report_text(report: &AuditReport) -> String {
    let AuditReport { ems, scopes, tickets, differences, notes, .. } = report;
    let looked_at = format!("{ems} EMs, {scopes} scopes, {tickets} tickets");
    let mut text = match differences.count {
        0 => format!("consistent: {looked_at}\n"),
        count => {
            let table = table(differences);
            format!("{table}{count} differences in {looked_at}. To make them what the tickets say: linkis-rm repair\n")
        }
    };
    for note in notes {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "note: {note}");
    }
    text
}

fn repaired_text(done: &Repaired) -> String {
    let mut text = match done.repaired.count {
        0 => "nothing was repaired\n".to_owned(),
        count => format!("{}{count} differences were repaired\n", table(&done.repaired)),
    };
    if !done.remaining.is_empty() {
        let (table, count) = (table(&done.remaining), done.remaining.count);
        let _ = write!(text, "\n{table}{count} could not be repaired\n");
    }
    text
}

/// One line for each difference, in columns.
fn table(differences: &Differences) -> String {
    let header = ["what", "counter", "stored", "true", ""].map(str::to_owned);
    let rows: Vec<[String; 5]> = std::iter::once(header).chain(differences.first.iter().map(cells)).collect();
    let width = |column: usize| rows.iter().filter_map(|row| Some(row.get(column)?.chars().count())).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2), width(3)];
    let mut text = String::new();
    for [what, counter, stored, from_tickets, problem] in &rows {
        let [a, b, c, d] = widths;
        let line = format!("{what:a$}  {counter:b$}  {stored:c$}  {from_tickets:d$}  {problem}");
        let _ = writeln!(text, "{}", line.trim_end());
    }
    if differences.first.len() < differences.count {
        let _ = writeln!(text, "... and {} more", differences.count - differences.first.len());
    }
    text
}

fn cells(difference: &Difference) -> [String; 5] {
    let Difference { what, counter, stored, from_tickets, problem } = difference;
    [what.clone(), counter.clone(), amounts(stored), amounts(from_tickets), problem.clone()]
}

fn amounts(amounts: &BTreeMap<Dimension, i64>) -> String {
    let pairs: Vec<String> =
        amounts.iter().map(|(dimension, amount)| format!("{}={amount}", dimension.key())).collect();
    pairs.join(" ")
}

#[cfg(test)]
mod tests {
    use time::OffsetDateTime;

    use super::*;

    #[test]
    fn differences_stand_in_columns() {
        let mut report = AuditReport { ems: 2, scopes: 1, tickets: 3, ..AuditReport::new(OffsetDateTime::UNIX_EPOCH) };
        assert_eq!(report_text(&report), "consistent: 2 EMs, 1 scopes, 3 tickets\n");
        report.note(|| "em=a/b is full".to_owned());
        let amounts = |cores| BTreeMap::from([(Dimension::Cores, cores), (Dimension::Custom("gpu".into()), 1)]);
        let used = Difference {
            what: "em=a/b".into(),
            counter: "used".into(),
            stored: amounts(12),
            from_tickets: amounts(7),
            problem: String::new(),
        };
        report.differences.extend([used, Difference::in_words("scope user=x", "row", "there is no row")]);
        assert_eq!(
            report_text(&report),
            "what          counter  stored                  true\n\
             em=a/b        used     cores=12 special.gpu=1  cores=7 special.gpu=1\n\
             scope user=x  row                                                     there is no row\n\
             2 differences in 2 EMs, 1 scopes, 3 tickets. To make them what the tickets say: linkis-rm repair\n\
             note: em=a/b is full\n"
        );
    }
}
