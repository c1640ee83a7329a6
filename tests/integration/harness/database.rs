//! Databases of the tests: a new one for each test; locks and holds that a test sets by SQL.

use super::*;

/// A database of its own. With `LINKIS_RM_CITUS_SUITE`, it is a cell on Citus, and queries of a test go to its worker.
pub struct Database {
    pub options: PgConnectOptions,
    pub pool: PgPool,
    cell: Option<Cell>,
}

fn on_citus() -> bool {
    std::env::var_os("LINKIS_RM_CITUS_SUITE").is_some()
}

impl From<PgConnectOptions> for Database {
    fn from(options: PgConnectOptions) -> Self {
        Self { pool: PgPool::connect_lazy_with(options.clone()), options, cell: None }
    }
}

impl Database {
    /// Creates a database with the schema of this build. It is a copy of a database that is migrated once in each run.
    pub async fn fresh() -> Self {
        static MIGRATED: OnceCell<String> = OnceCell::const_new();
        if on_citus() {
            return Self::empty().await;
        }
        let migrated = MIGRATED.get_or_init(async || {
            let database = Self::empty().await;
            let mut migrate = Command::new(*PROGRAM);
            migrate.arg("migrate").env("DATABASE_URL", database.url()).env_remove("LINKIS_RM_DATA_DIR");
            assert!(migrate.status().unwrap().success());
            database.options.get_database().unwrap().to_owned()
        });
        new_database(migrated.await).await.into()
    }

    /// Creates a database without tables.
    pub async fn empty() -> Self {
        if on_citus() {
            let cell = Cell::make().await.expect("an installed Citus");
            return Self { cell: Some(cell.clone()), ..cell.database().await };
        }
        new_database("template0").await.into()
    }

    /// The target for a store.
    pub fn target(&self) -> ConnectTarget {
        self.cell.as_ref().map_or_else(|| self.options.clone().into(), Cell::target)
    }

    /// This database behind a proxy. Queries of the test bypass the proxy.
    pub fn behind_proxy(&self, name: &str) -> (Proxy, Self) {
        let proxy = Proxy::start(name, self.options.get_socket().expect("not a cell"));
        let options = self.options.clone().socket(proxy.folder());
        (proxy, Self { options, pool: self.pool.clone(), cell: None })
    }

    /// The URL for a process. The URL of a cell ends with `#` and its name.
    pub fn url(&self) -> String {
        if let Some(cell) = &self.cell {
            return format!("{}#{}", cell.url(), cell.name);
        }
        url_of(&self.options)
    }

    pub async fn connect(&self) -> PgConnection {
        self.options.connect().await.unwrap()
    }

    /// Runs statements, separated by semicolons, and returns the number of rows that they changed.
    pub async fn execute(&self, sql: impl AsRef<str>) -> u64 {
        execute(&self.pool, sql).await
    }

    /// The value of a query of one row and one column.
    pub async fn scalar<T: Value>(&self, sql: impl AsRef<str>) -> T {
        let sql = sqlx::AssertSqlSafe(sql.as_ref().to_owned());
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    pub async fn count(&self, sql: impl AsRef<str>) -> i64 {
        self.scalar(sql).await
    }

    /// The values of a query of one column.
    pub async fn column<T: Value>(&self, sql: impl AsRef<str>) -> Vec<T> {
        let sql = sqlx::AssertSqlSafe(sql.as_ref().to_owned());
        sqlx::query_scalar(sql).fetch_all(&self.pool).await.unwrap()
    }

    /// The only row of a query, as a tuple.
    pub async fn row<T: for<'r> FromRow<'r, PgRow> + Send + Unpin>(&self, sql: impl AsRef<str>) -> T {
        self.rows(sql).await.remove(0)
    }

    /// The rows of a query, as tuples.
    pub async fn rows<T: for<'r> FromRow<'r, PgRow> + Send + Unpin>(&self, sql: impl AsRef<str>) -> Vec<T> {
        let sql = sqlx::AssertSqlSafe(sql.as_ref().to_owned());
        sqlx::query_as(sql).fetch_all(&self.pool).await.unwrap()
    }

    /// Waits until so many requests wait.
    pub async fn waiting(&self, count: i64) {
        let waiting = "SELECT count(*) FROM linkis_resource_waiting";
        eventually("requests wait", LONG, async || self.count(waiting).await == count).await;
    }

    /// Waits until an instance owns the lease on background work.
    pub async fn lease_is_owned(&self) {
        let leases = "SELECT count(*) FROM linkis_rm_lease";
        eventually("an instance owns the lease", LONG, async || self.count(leases).await > 0).await;
    }

    /// Number of history lines of an action.
    pub async fn recorded(&self, action: &str) -> i64 {
        self.count(format!("SELECT count(*) FROM linkis_resource_action_record WHERE action = '{action}'")).await
    }

    /// Holds an EM by a committed row, as an operator can without the service. Calls on it wait until [`Self::release_holds`].
    pub async fn hold_by_hand(&self, em: &EmInstance) {
        insert_hold(&self.pool, em).await;
    }

    /// Opens a transaction that runs `sql`. Its locks last until `ROLLBACK` or until the connection is dropped.
    pub async fn transaction(&self, sql: &str) -> PgConnection {
        let mut connection = self.connect().await;
        execute(&mut connection, format!("BEGIN; {sql}")).await;
        connection
    }

    /// Opens a transaction that locks an EM. Calls on the EM wait until the transaction ends.
    pub async fn transaction_that_holds(&self, em: &EmInstance) -> PgConnection {
        let mut holder = self.transaction("").await;
        insert_hold(&mut holder, em).await;
        holder
    }

    /// Ends all holds of EMs and users.
    pub async fn release_holds(&self) {
        self.execute("DELETE FROM linkis_resource_lock").await;
    }
}

/// A type of one column.
pub trait Value: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin {}

impl<T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin> Value for T {}

async fn insert_hold(executor: impl PgExecutor<'_>, em: &EmInstance) {
    let hold = "INSERT INTO linkis_resource_lock (scope, em_application_name, em_instance) VALUES ('em', $1, $2)";
    let hold = sqlx::query(hold).bind(em.application_name.as_str()).bind(em.instance.as_str());
    hold.execute(executor).await.unwrap();
}

/// The URL of a database with these options.
pub fn url_of(options: &PgConnectOptions) -> String {
    let (user, database) = (options.get_username(), options.get_database().unwrap());
    match options.get_socket() {
        Some(socket) => {
            format!("postgres://{user}@localhost:{}/{database}?host={}", options.get_port(), socket.display())
        }
        None => format!("postgres://{user}@{}:{}/{database}", options.get_host(), options.get_port()),
    }
}

/// The URL of a database. The folder of the socket is in the query, because its path is no host name.
pub fn url(socket: &Path, database: &str) -> String {
    format!("postgres://postgres@localhost:5432/{database}?host={}", socket.display())
}
