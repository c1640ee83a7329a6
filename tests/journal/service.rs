//! Processes of the journal: a private PostgreSQL, the program under test, and calls to it with messages as bytes.
//!
//! Callers: `run`, `record` and `surface`. Never: uses the client or the messages of this workspace, which may change with the program.

use std::{
    fs,
    os::unix::{fs::chown, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use prost::bytes::{Buf as _, BufMut as _, Bytes};
use sqlx::postgres::{PgConnectOptions, PgPool};
use tonic::{
    Code, Request, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::{Channel, Endpoint},
};

/// Process that is killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Private PostgreSQL in its own folder, without disk flushes.
pub struct Postgres {
    _process: Process,
    folder: PathBuf,
}

impl Postgres {
    pub fn start() -> Self {
        let folder = std::env::temp_dir().join(format!("linkis-rm-journal-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let account = account();
        if let Some((uid, gid)) = account {
            chown(&folder, Some(uid), Some(gid)).unwrap();
        }
        let data = folder.join("data");
        let command = |program: &str| {
            let mut command = Command::new(program_path(program));
            command.current_dir(&folder).stdout(Stdio::null()).stderr(Stdio::null());
            if let Some((uid, gid)) = account {
                command.uid(uid).gid(gid);
            }
            command
        };
        let made = command("initdb")
            .args(["-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "-N", "-D"])
            .arg(&data)
            .status();
        assert!(made.unwrap().success(), "initdb failed");
        let process = command("postgres")
            .arg("-D")
            .arg(&data)
            .args([
                "-c",
                "listen_addresses=",
                "-c",
                "fsync=off",
                "-c",
                "full_page_writes=off",
                "-c",
                "autovacuum=off",
                "-k",
            ])
            .arg(&folder)
            .spawn()
            .unwrap();
        Self { _process: Process(process), folder }
    }

    fn url(&self, database: &str) -> String {
        format!("postgres://postgres@localhost:5432/{database}?host={}", self.folder.display())
    }

    pub fn options(&self, database: &str) -> PgConnectOptions {
        PgConnectOptions::new().socket(&self.folder).username("postgres").database(database)
    }

    pub async fn create(&self, database: &str) -> PgPool {
        let start = Instant::now();
        let admin = loop {
            match PgPool::connect_with(self.options("postgres")).await {
                Ok(pool) => break pool,
                Err(error) if start.elapsed() > Duration::from_secs(30) => panic!("PostgreSQL: {error}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("CREATE DATABASE {database}"))).execute(&admin).await.unwrap();
        PgPool::connect_lazy_with(self.options(database))
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let _ = self._process.0.kill();
        let _ = self._process.0.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns the account that PostgreSQL runs as, because it refuses to run as root.
fn account() -> Option<(u32, u32)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let passwd = fs::read_to_string("/etc/passwd").unwrap();
    let ids = |name: &str| {
        let line = passwd.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut fields = line.split(':').skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    ids("postgres").or_else(|| ids("nobody"))
}

fn program_path(program: &str) -> PathBuf {
    let mut folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    folders.extend((15..30).rev().map(|major| Path::new("/usr/lib/postgresql").join(major.to_string()).join("bin")));
    folders
        .into_iter()
        .map(|folder| folder.join(program))
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("no {program}"))
}

/// The program under test, and a connection to it.
pub struct Service {
    _process: Process,
    channel: Channel,
    tokens: Vec<String>,
}

impl Service {
    /// Starts the program. `tokens` has the secrets of the tokens from number 1.
    pub async fn start(
        program: &Path,
        postgres: &Postgres,
        database: &str,
        arguments: &[String],
        tokens: Vec<String>,
    ) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let url = postgres.url(database);
        let log = fs::File::create(postgres.folder.join(format!("{database}.log"))).unwrap();
        let process = Command::new(program)
            .env_clear()
            .args(["--listen", &format!("127.0.0.1:{port}"), "--log-level", "warn", "--database-url", &url])
            .args(if arguments.iter().any(|argument| argument == "--http-listen") {
                &[][..]
            } else {
                &["--http-listen", ""]
            })
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut process = Process(process);
        let start = Instant::now();
        let channel = loop {
            let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap();
            match endpoint.connect().await {
                Ok(channel) => break channel,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "{}: {error}", program.display()),
            }
            let log = || fs::read_to_string(postgres.folder.join(format!("{database}.log"))).unwrap_or_default();
            assert!(process.0.try_wait().unwrap().is_none(), "{} ended:\n{}", program.display(), log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        Self { _process: process, channel, tokens }
    }

    /// Returns the number of the administrator's token; 0 if the program requires no token.
    pub fn admin(&self) -> u32 {
        u32::from(!self.tokens.is_empty())
    }

    /// Makes a call that must end within two minutes, and returns the first message of its reply.
    pub fn call(
        &self,
        method: &str,
        token: u32,
        timeout: u32,
        message: Bytes,
    ) -> impl Future<Output = Result<Bytes, Status>> + use<> {
        let answer = tokio::time::timeout(Duration::from_secs(120), self.waiting_call(method, token, timeout, message));
        async { answer.await.map_err(|_| Status::new(Code::Unknown, "no answer within two minutes"))? }
    }

    /// Makes a call that may wait as long as its chapter lasts.
    pub fn waiting_call(
        &self,
        method: &str,
        token: u32,
        timeout: u32,
        message: Bytes,
    ) -> impl Future<Output = Result<Bytes, Status>> + use<> {
        let path = http::uri::PathAndQuery::try_from(method).unwrap();
        let mut request = Request::new(message);
        if token > 0 {
            // A number without a token: an unknown secret of the right form.
            let secret = self.tokens.get(token as usize - 1).cloned().unwrap_or_else(|| format!("lrm_{token:0>49}"));
            request.metadata_mut().insert("authorization", format!("Bearer {secret}").parse().unwrap());
        }
        if timeout > 0 {
            request.metadata_mut().insert("grpc-timeout", format!("{timeout}m").parse().unwrap());
        }
        let mut client = Grpc::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
        async move {
            client.ready().await.map_err(|error| Status::new(Code::Unavailable, format!("no connection: {error}")))?;
            let mut stream = client.server_streaming(request, path, Raw).await?.into_inner();
            let answer = stream.message().await?;
            // HTTP/2 closes a connection with many streams that ended early, and thereby waiting calls. Only `Watch` and `FollowActions`
            // have no end.
            let _ = tokio::time::timeout(Duration::from_millis(50), stream.message()).await;
            answer.ok_or_else(|| Status::new(Code::Unknown, "no message"))
        }
    }

    /// Returns all descriptors of the service, by reflection.
    pub async fn descriptors(&self) -> Vec<u8> {
        let mut files = prost_types::FileDescriptorSet::default();
        for name in
            ["ResourceManagerService", "UsageService", "LimitService", "AdminService", "ExternalResourceService"]
        {
            let symbol = format!("linkis.rm.v1.{name}");
            let mut request = vec![4 << 3 | 2, symbol.len() as u8];
            request.extend(symbol.bytes());
            let method = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
            let answer = self.call(method, 0, 0, request.into()).await.unwrap();
            for file in reflected(&answer) {
                let file = <prost_types::FileDescriptorProto as prost::Message>::decode(file).unwrap();
                if !files.file.contains(&file) {
                    files.file.push(file);
                }
            }
        }
        let mut needed: Vec<String> = files.file.iter().flat_map(|file| file.dependency.clone()).collect();
        while let Some(name) = needed.pop() {
            if files.file.iter().any(|file| file.name() == name) {
                continue;
            }
            let mut request = vec![3 << 3 | 2, name.len() as u8];
            request.extend(name.bytes());
            let answer = self
                .call("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", 0, 0, request.into())
                .await
                .unwrap();
            for file in reflected(&answer) {
                let file = <prost_types::FileDescriptorProto as prost::Message>::decode(file).unwrap();
                needed.extend(file.dependency.clone());
                files.file.push(file);
            }
        }
        for file in &mut files.file {
            file.source_code_info = None;
        }
        prost::Message::encode_to_vec(&files)
    }
}

/// Creates tokens by the command of the program before it serves, and returns their secrets. Revokes the token with the name `revoked`.
pub fn create_tokens(program: &Path, postgres: &Postgres, database: &str, tokens: &[String]) -> Vec<String> {
    let run = |arguments: &[&str]| {
        let url = postgres.url(database);
        let done = Command::new(program).env_clear().args(arguments).args(["--database-url", &url]).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap().trim().to_owned()
    };
    if !tokens.is_empty() {
        run(&["migrate"]);
    }
    let create = |token: &String| run(&[&["token", "create"], &token.split(' ').collect::<Vec<_>>()[..]].concat());
    let secrets = tokens.iter().map(create).collect();
    if tokens.iter().any(|token| token.starts_with("--name revoked ")) {
        run(&["token", "revoke", "--name", "revoked", "--yes", "--reason", "a test"]);
    }
    secrets
}

/// `ServerReflectionResponse.file_descriptor_response.file_descriptor_proto`.
fn reflected(answer: &[u8]) -> Vec<&[u8]> {
    let inner = |bytes, wanted| -> Vec<&[u8]> {
        crate::wire::delimited_fields(bytes)
            .into_iter()
            .filter(|(number, _)| *number == wanted)
            .map(|(_, bytes)| bytes)
            .collect()
    };
    inner(answer, 4).into_iter().flat_map(|files| inner(files, 1)).collect()
}

/// Codec that does not decode messages.
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(bytes.copy_to_bytes(bytes.remaining())))
    }
}
