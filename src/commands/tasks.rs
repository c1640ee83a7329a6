//! `tasks`: background tasks of the service; `instances`: its live instances.

use clap::Args;

use crate::{
    client::calls,
    transport::proto::{
        Job, ListInstancesRequest, ListInstancesResponse, ListTasksRequest, ServerInstance, TaskStatus,
    },
};

use super::{
    asking::Watching,
    failure::{Answer, Failure},
    list::{ListArguments, listed},
    output::{
        Printer,
        table::{Column, Row},
        text,
    },
    service::{Asked, TIMEOUT},
};

/// Arguments of `tasks`.
#[derive(Debug, Clone, Args)]
pub struct Tasks {
    #[command(flatten)]
    watching: Watching,
}

/// Arguments of `instances`.
#[derive(Debug, Clone, Args)]
pub struct Instances {
    #[command(flatten)]
    list: ListArguments,
}

const TASK_COLUMNS: &[Column] = &[
    Column::text("TASK"),
    Column::text("INSTANCE"),
    Column::text("LAST SUCCESS"),
    Column::number("LAG"),
    Column::number("STEPS"),
    Column::number("ERRORS"),
    Column::text("LAST RUN").wide(),
    Column::text("LAST ERROR").wide(),
];

const JOB_COLUMNS: &[Column] = &[Column::text("JOB"), Column::text("OF"), Column::number("LEFT")];

const INSTANCE_COLUMNS: &[Column] = &[
    Column::id("INSTANCE"),
    Column::text("ADDRESS"),
    Column::text("VERSION"),
    Column::text("SINCE"),
    Column::number("GRANTS/S"),
    Column::number("REFUSALS/S"),
];

listed!(whole LIST_INSTANCES: ListInstancesRequest => ListInstancesResponse, instances: ServerInstance, INSTANCE_COLUMNS,
    |instance| vec![instance_row(instance)]);

impl Instances {
    /// Lists the instances.
    pub async fn run(self) -> Result<Answer, Failure> {
        self.list.list(ListInstancesRequest {}).await
    }
}

impl Tasks {
    /// Shows the background tasks.
    pub async fn run(self) -> Result<Answer, Failure> {
        let show = async |service: &Asked, printer: &mut Printer| {
            let answer = service.make(&calls::LIST_TASKS, &ListTasksRequest {}).await?;
            if printer.is_json() {
                return printer.answer(&calls::LIST_TASKS, &answer, String::new);
            }
            let rows: Vec<Row> = answer.tasks.iter().map(task_row).collect();
            printer.rows(TASK_COLUMNS, &rows)?;
            if !answer.jobs.is_empty() {
                printer.print("\n")?;
                let rows: Vec<Row> = answer.jobs.iter().map(job_row).collect();
                printer.rows(JOB_COLUMNS, &rows)?;
            }
            Ok(())
        };
        self.watching.rounds(TIMEOUT, show).await?;
        Ok(Answer::Yes)
    }
}

fn task_row(task: &TaskStatus) -> Row {
    vec![
        task.task.clone(),
        task.instance_id.clone(),
        text::time(task.last_success_time.as_ref()),
        task.lag.map_or_else(|| text::NOTHING.to_owned(), |lag| text::seconds(lag.seconds)),
        task.steps.to_string(),
        task.errors.to_string(),
        text::time(task.last_run_time.as_ref()),
        if task.last_error.is_empty() { text::NOTHING.to_owned() } else { task.last_error.clone() },
    ]
}

fn job_row(job: &Job) -> Row {
    vec![job.kind.clone(), job.subject.clone(), job.left.to_string()]
}

fn instance_row(instance: &ServerInstance) -> Row {
    vec![
        instance.instance_id.clone(),
        text::or_nothing(&instance.address),
        instance.version.clone(),
        text::time(instance.start_time.as_ref()),
        format!("{:.1}", instance.grants_per_second),
        format!("{:.1}", instance.refusals_per_second),
    ]
}
