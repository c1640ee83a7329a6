//! State notifications for systemd (`Type=notify`).
//!
//! The watchdog is not used: it would restart a process that waits for its database, and a process with a defect ends
//! anyway. Caller: the server's start and shutdown. Never: blocks or fails the service.

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// Sends a state such as `READY=1` to `NOTIFY_SOCKET`, if set. A failure is only logged.
pub fn notify(state: &str) {
    let Some(socket) = env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()) else { return };
    if let Err(error) = send_to(&socket, state) {
        tracing::warn!(%error, state, "NOTIFY_SOCKET does not accept the state");
    }
}

/// Sends to a socket file, or to an abstract name after an @.
fn send_to(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let datagram = UnixDatagram::unbound()?;
    // A receiver that does not read must not block the service.
    datagram.set_nonblocking(true)?;
    datagram.send_to_addr(state.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_sent_to_file_and_abstract_name() {
        let path = env::temp_dir().join(format!("linkis-rm-notify-{}", std::process::id()));
        let name = format!("linkis-rm-notify-{}", std::process::id());
        let sockets = [
            (UnixDatagram::bind(&path).unwrap(), path.clone().into_os_string()),
            (
                UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap(),
                format!("@{name}").into(),
            ),
        ];
        for (listener, socket) in sockets {
            send_to(&socket, "READY=1").unwrap();
            let mut state = [0; 64];
            let length = listener.recv(&mut state).unwrap();
            assert_eq!(&state[..length], b"READY=1");
        }
        std::fs::remove_file(path).unwrap();
        assert!(send_to("/nowhere/at/all".as_ref(), "READY=1").is_err());
    }
}
