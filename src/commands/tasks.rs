//! `tasks`: background tasks of the service; `instance`: its live instances.

use clap::{Args, Subcommand};

use rm_client::calls;
use rm_proto::v1::{Job, ListInstancesRequest, ListInstancesResponse, ListTasksRequest, ServerInstance, TaskStatus};

use super::{
    error::{CommandFailure, CommandReply},
    help::end,
    list::{ListArguments, listed},
    output::{
        Printer,
        table::{Column, TableRow, cells},
        text,
    },
    service::{ServiceClient, TIMEOUT},
    service_arguments::PollArguments,
};

/// Arguments of `tasks`.
#[derive(Debug, Clone, Args)]
pub struct ListTasksCommand {
    #[command(flatten)]
    watching: PollArguments,
}

/// Verbs of `instance`.
#[derive(Debug, Clone, Subcommand)]
pub enum InstanceCommand {
    /// List the live instances of the service.
    #[command(after_help = end("instance list", &calls::LIST_INSTANCES))]
    List(ListInstancesCommand),
}

impl InstanceCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
        }
    }
}

/// Arguments of `instance list`.
#[derive(Debug, Clone, Args)]
pub struct ListInstancesCommand {
    #[command(flatten)]
    list: ListArguments,
}

const TASK_COLUMNS: &[Column] = &[
    Column::text("TASK").key(),
    Column::ticket("INSTANCE").key(),
    Column::number("LAST SUCCESS").key(),
    Column::number("LAG").key(),
    Column::number("STEPS"),
    Column::number("ERRORS").key(),
    Column::number("LAST RUN").wide(),
    Column::text("LAST ERROR").wide(),
];

const JOB_COLUMNS: &[Column] = &[Column::text("JOB").key(), Column::name("OF").key(), Column::number("LEFT").key()];

const INSTANCE_COLUMNS: &[Column] = &[
    Column::text("INSTANCE").key(),
    Column::name("ADDRESS").key(),
    Column::text("VERSION"),
    Column::number("SINCE"),
    Column::number("GRANTS/S"),
    Column::number("REFUSALS/S"),
];

listed!(whole LIST_INSTANCES: ListInstancesRequest => ListInstancesResponse, instances: ServerInstance, INSTANCE_COLUMNS,
    |instance| vec![instance_row(instance)]);

impl ListInstancesCommand {
    /// Lists the instances.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        self.list.list(ListInstancesRequest {}).await
    }
}

impl ListTasksCommand {
    /// Shows the background tasks.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let show = async |service: &ServiceClient, printer: &mut Printer| {
            let answer = service.make(&calls::LIST_TASKS, &ListTasksRequest {}).await?;
            if printer.is_json() {
                return printer.answer(&calls::LIST_TASKS, &answer, String::new);
            }
            let rows: Vec<TableRow> = answer.tasks.iter().map(task_row).collect();
            printer.rows(TASK_COLUMNS, &rows)?;
            if !answer.jobs.is_empty() {
                printer.print("\n")?;
                let rows: Vec<TableRow> = answer.jobs.iter().map(job_row).collect();
                printer.rows(JOB_COLUMNS, &rows)?;
            }
            Ok(())
        };
        self.watching.rounds(TIMEOUT, show).await?;
        Ok(CommandReply::Yes)
    }
}

fn task_row(task: &TaskStatus) -> TableRow {
    cells![
        task.task.clone(),
        task.instance_id.clone(),
        task.last_success_time.as_ref(),
        task.lag.map_or_else(|| text::NOTHING.to_owned(), |lag| text::seconds(lag.seconds)),
        task.steps.to_string(),
        task.errors.to_string(),
        task.last_run_time.as_ref(),
        if task.last_error.is_empty() { text::NOTHING.to_owned() } else { task.last_error.clone() },
    ]
}

fn job_row(job: &Job) -> TableRow {
    cells![job.kind.clone(), text::name(&job.subject), job.left.to_string()]
}

fn instance_row(instance: &ServerInstance) -> TableRow {
    cells![
        instance.instance_id.clone(),
        text::or_nothing(&instance.address),
        instance.version.clone(),
        instance.start_time.as_ref(),
        format!("{:.1}", instance.grants_per_second),
        format!("{:.1}", instance.refusals_per_second),
    ]
}
