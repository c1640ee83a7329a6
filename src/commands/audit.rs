//! `audit`, `repair`: comparison of the stored counters with the tickets, and their repair.

use std::fmt::Write as _;

use clap::Args;

use rm_client::calls;
use rm_proto::v1::{AuditRequest, AuditResponse, Difference, RepairRequest, RepairResponse};

use super::{
    consent::Consent,
    error::{CommandFailure, CommandReply},
    named::{EmName, find_em},
    output::{
        Printer,
        table::{Column, TableRow, cells},
        text,
    },
    service::TIMEOUT_LONG,
    service_arguments::ServiceArguments,
    values,
};

/// Arguments of `audit`.
#[derive(Debug, Clone, Args)]
pub struct AuditCommand {
    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `repair`.
#[derive(Debug, Clone, Args)]
pub struct RepairCommand {
    /// Only the counters of this EM: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance, also without its end.
    #[arg(long, value_parser = EmName::parse, conflicts_with = "scope")]
    em: Option<EmName>,

    /// Only the counters of the scope with exactly these labels, KEY=VALUE. Repeatable.
    #[arg(long, value_name = "LABEL", value_parser = values::label)]
    scope: Vec<(String, String)>,

    #[command(flatten)]
    consent: Consent,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Columns with exact amounts, because a difference of one byte matters.
const COLUMNS: &[Column] = &[
    Column::name("WHAT").key(),
    Column::text("COUNTER").key(),
    Column::text("STORED"),
    Column::text("TRUE"),
    Column::text("PROBLEM"),
];

impl AuditCommand {
    /// Prints the differences.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT_LONG)?;
        let report = service.make_slowly("auditing", &calls::AUDIT, &AuditRequest {}).await?;
        let mut printer = self.arguments.printer();
        if printer.is_json() {
            printer.answer(&calls::AUDIT, &report, String::new)?;
        } else {
            table(&mut printer, &report.differences, report.difference_count)?;
            printer.answer(&calls::AUDIT, &report, || summary(&report))?;
        }
        Ok(CommandReply::yes_if(report.difference_count == 0))
    }
}

impl RepairCommand {
    /// Prints the repaired and the remaining differences.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT_LONG)?;
        let everything =
            "This sets every counter to the sum of its tickets and ends tickets on EMs that do not exist. Repair?";
        let em = find_em(self.em.as_ref(), &service).await?;
        let scope = self.scope.iter().cloned().collect();
        let question = match &em {
            None if self.scope.is_empty() => everything.to_owned(),
            None => format!("This sets the counters of {} to the sums of its tickets. Repair?", text::labels(&scope)),
            em => format!("This sets the counters of {} to the sums of its tickets. Repair?", text::em(em.as_ref())),
        };
        let reason = self.consent.confirm(&question)?;
        let question = RepairRequest { em, scope: self.scope.into_iter().collect(), reason };
        let done = service.make_slowly("repairing", &calls::REPAIR, &question).await?;
        let mut printer = self.arguments.printer();
        if printer.is_json() {
            printer.answer(&calls::REPAIR, &done, String::new)?;
        } else {
            print_repair(&mut printer, &done)?;
        }
        Ok(CommandReply::yes_if(done.remaining_count == 0))
    }
}

fn summary(report: &AuditResponse) -> String {
    let AuditResponse { ems, scopes, tickets, difference_count, notes, .. } = report;
    let audited = format!("{ems} EMs, {scopes} scopes, {tickets} tickets");
    let mut text = match difference_count {
        0 => format!("consistent: {audited}\n"),
        count => {
            format!("{count} differences in {audited}. To repair them: linkis-rm repair\n")
        }
    };
    for note in notes {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "note: {note}");
    }
    text
}

fn print_repair(printer: &mut Printer, done: &RepairResponse) -> Result<(), CommandFailure> {
    table(printer, &done.repaired, done.repaired_count)?;
    match done.repaired_count {
        0 => printer.print("nothing was repaired\n")?,
        count => printer.print(&format!("{count} differences were repaired\n"))?,
    }
    if done.remaining_count > 0 {
        printer.print("\n")?;
        table(printer, &done.remaining, done.remaining_count)?;
        let advice = "PROBLEM states why, and what to do before the next repair";
        printer.print(&format!("{} could not be repaired; {advice}\n", done.remaining_count))?;
    }
    Ok(())
}

/// Prints one line per listed difference.
fn table(printer: &mut Printer, differences: &[Difference], count: i64) -> Result<(), CommandFailure> {
    if differences.is_empty() {
        return Ok(());
    }
    let rows: Vec<TableRow> = differences.iter().map(row).collect();
    printer.rows(COLUMNS, &rows)?;
    match count.saturating_sub(i64::try_from(differences.len()).unwrap_or(i64::MAX)) {
        more if more > 0 => printer.print(&format!("... and {more} more\n")),
        _ => Ok(()),
    }
}

fn row(difference: &Difference) -> TableRow {
    let amounts = |amounts: &std::collections::BTreeMap<String, i64>| {
        let pairs: Vec<String> = amounts.iter().map(|(dimension, amount)| format!("{dimension}={amount}")).collect();
        pairs.join(" ")
    };
    let Difference { what, counter, stored, from_tickets, problem } = difference;
    cells![what.clone(), counter.clone(), amounts(stored), amounts(from_tickets), problem.clone()]
}
