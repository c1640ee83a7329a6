//! A crowd of TLS handshakes from one address: other addresses are served meanwhile and complete their handshakes.

use std::{
    net::SocketAddr,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use rustls::pki_types::ServerName;
use tokio::{
    net::{TcpSocket, TcpStream},
    task::JoinSet,
};
use tokio_rustls::TlsConnector;
use tonic::transport::Channel;

use crate::{
    certificates::{FAR, Folder, authority, certify, config, connect_to},
    harness::*,
    identity::{token, with},
};

/// Address of the crowd, which no other caller has.
const CROWD: &str = "127.0.0.2:0";

/// Opens a connection of the crowd, up to the end of its handshake; `None` if the server closes it.
async fn join(to: SocketAddr, tls: TlsConnector) -> Option<tokio_rustls::client::TlsStream<TcpStream>> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(CROWD.parse().unwrap()).unwrap();
    let stream = socket.connect(to).await.ok()?;
    tls.connect(ServerName::try_from("rm.example").unwrap(), stream).await.ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshake_crowd_delays_no_other_address() {
    let crowd = crowd_of(300);
    let (database, folder, ca) = (Database::fresh().await, Folder::new("handshakes"), authority("ca"));
    let admin = token(&database, "admin", &["--role", "admin"]);
    folder.write_all(&certify(&ca, &["rm.example"], &[], FAR), &ca);
    let mut command = Command::new(*PROGRAM);
    command.args(["--database-url", &database.url()]);
    let (cert, key) = (folder.0.join("cert"), folder.0.join("key"));
    command.args(["--tls-cert".as_ref(), cert.as_os_str(), "--tls-key".as_ref(), key.as_os_str()]);
    let rm = Process::start_command(&mut command, |line| println!("{line}"));
    let address = rm.address.strip_prefix("http://").unwrap().to_owned();
    let kept = connect_to(&address, &ca, None).await.unwrap();
    let ask = |channel: &Channel| {
        let mut usage = UsageServiceClient::new(with(channel, &admin));
        async move { usage.get_server_info(proto::GetServerInfoRequest {}).await }
    };
    for _ in 0..50 {
        ask(&kept).await.unwrap();
    }
    let idle = rm.memory();

    // All at the same time, from a separate thread; each keeps its connection open.
    let (tls, to) = (TlsConnector::from(config(&ca, None)), address.parse().unwrap());
    let is_over = Arc::new(AtomicBool::new(false));
    let (leave, left) = std::sync::mpsc::sync_channel::<()>(1);
    let crowding = std::thread::spawn({
        let is_over = is_over.clone();
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut joining = JoinSet::new();
                (0..crowd).for_each(|_| drop(joining.spawn(join(to, tls.clone()))));
                let _joined: Vec<_> = joining.join_all().await;
                is_over.store(true, Ordering::Relaxed);
                let _ = left.recv();
            })
        }
    });
    let (mut most, mut rounds) = (idle, 0);
    for round in 0.. {
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        tokio::time::timeout(LONG, ask(&kept)).await.expect("a reply").unwrap();
        most = most.max(rm.memory());
        if round % 20 == 0 {
            let fresh = tokio::time::timeout(LONG, connect_to(&address, &ca, None)).await.expect("a connection");
            tokio::time::timeout(LONG, ask(&fresh.unwrap())).await.expect("a reply").unwrap();
        }
        rounds += i32::from(!is_over.load(Ordering::Relaxed));
    }
    assert!(rounds > 0, "all replies are behind the crowd");
    most = most.max(rm.memory());
    drop(leave);
    tokio::task::spawn_blocking(|| crowding.join().unwrap()).await.unwrap();
    let each = (most - idle) / crowd;
    assert!(each < 200 << 10, "{each} bytes for each");
    // The connections without a finished handshake are closed.
    ask(&kept).await.unwrap();
}
