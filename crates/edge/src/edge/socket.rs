//! Listening sockets: a TCP port, or a Unix socket.
//!
//! A Unix socket has a lock file, so that two instances never serve one path. Its file is removed when the listener is
//! dropped. Callers: the server and `listener`.

use std::{
    fmt,
    fs::{File, TryLockError},
    io,
    net::{IpAddr, SocketAddr},
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
};

/// Address to listen on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    /// The first of these addresses that can be bound: a name may have several.
    Tcp(Vec<SocketAddr>),
    /// A Unix socket at this path.
    Unix(PathBuf),
}

impl From<SocketAddr> for ListenAddress {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(vec![address])
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addresses) => {
                for (n, address) in addresses.iter().enumerate() {
                    write!(f, "{}{address}", if n > 0 { ", " } else { "" })?;
                }
                Ok(())
            }
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Listening socket.
#[derive(Debug)]
pub enum Listener {
    /// TCP port.
    Tcp(TcpListener),
    /// Unix socket.
    Unix(UnixSocket),
}

/// Unix socket with its file, which is removed on drop.
#[derive(Debug)]
pub struct UnixSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Locked file: its holder owns the file at `path`.
    _lock: File,
}

impl Listener {
    /// Binds the address.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if another process uses it, and other errors of the system.
    pub async fn bind(listen: &ListenAddress) -> io::Result<Self> {
        match listen {
            ListenAddress::Tcp(addresses) => Ok(Self::Tcp(TcpListener::bind(addresses.as_slice()).await?)),
            ListenAddress::Unix(path) => Ok(Self::Unix(UnixSocket::bind(path).await?)),
        }
    }

    /// Returns the bound address, as clients connect to it.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn address(&self) -> io::Result<ListenAddress> {
        match self {
            Self::Tcp(listener) => Ok(listener.local_addr()?.into()),
            Self::Unix(socket) => Ok(ListenAddress::Unix(socket.path.clone())),
        }
    }

    /// Waits for the next connection. Returns its stream and the address of its peer.
    ///
    /// # Errors
    /// Errors of the system.
    pub async fn accept(&self) -> io::Result<(PeerStream, PeerAddress)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                Ok((PeerStream::Tcp(stream), PeerAddress(Some(address))))
            }
            Self::Unix(socket) => Ok((PeerStream::Unix(socket.listener.accept().await?.0), PeerAddress(None))),
        }
    }
}

impl UnixSocket {
    /// Binds the path. A socket file of a process that has ended is replaced. A socket that accepts connections, and
    /// any other file, is not.
    async fn bind(path: &Path) -> io::Result<Self> {
        let mut lock = path.as_os_str().to_owned();
        lock.push(".lock");
        // Without the lock, two instances that start together would each take the other's file for an abandoned one.
        let lock = File::create(lock)?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::ErrorKind::AddrInUse.into(),
            TryLockError::Error(error) => error,
        })?;
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_behind(path).await => {
                std::fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            bound => bound?,
        };
        Ok(Self { listener, path: path.to_owned(), _lock: lock })
    }
}

/// Returns true if the file is a socket that refuses connections.
async fn is_left_behind(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket && UnixStream::connect(path).await.is_err_and(refused)
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        // A remaining file is replaced by the next instance.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Address of a peer; none for a Unix socket.
#[derive(Debug, Clone, Copy)]
pub struct PeerAddress(Option<SocketAddr>);

impl PeerAddress {
    /// Returns the address without the port; `None` for a Unix socket.
    pub fn ip(&self) -> Option<IpAddr> {
        self.0.map(|address| address.ip())
    }
}

impl From<SocketAddr> for PeerAddress {
    fn from(address: SocketAddr) -> Self {
        Self(Some(address))
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("unix"),
        }
    }
}

/// Stream of a connection.
#[derive(Debug)]
pub enum PeerStream {
    /// TCP.
    Tcp(TcpStream),
    /// Unix socket.
    Unix(UnixStream),
}

impl PeerStream {
    /// Disables the delay of small packets.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nodelay(true),
            Self::Unix(_) => Ok(()),
        }
    }
}

/// Makes one call on either stream.
macro_rules! either {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream.get_mut() {
            PeerStream::Tcp(inner) => {
                let $inner = Pin::new(inner);
                $call
            }
            PeerStream::Unix(inner) => {
                let $inner = Pin::new(inner);
                $call
            }
        }
    };
}

impl AsyncRead for PeerStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_read(cx, buffer))
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write_vectored(cx, parts))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(stream) => stream.is_write_vectored(),
            Self::Unix(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn bind(path: &Path) -> Result<Listener, io::ErrorKind> {
        Listener::bind(&ListenAddress::Unix(path.to_owned())).await.map_err(|error| error.kind())
    }

    #[tokio::test]
    async fn stale_socket_is_replaced() {
        let folder = std::env::temp_dir().join(format!("linkis-rm-socket-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("rm.sock");
        let first = bind(&path).await.unwrap();
        assert_eq!(first.address().unwrap().to_string(), format!("unix:{}", path.display()));
        assert_eq!(bind(&path).await.unwrap_err(), io::ErrorKind::AddrInUse, "another instance uses the socket");
        drop(first);
        assert!(!path.exists(), "the socket is removed with its listener");

        // As after a killed process.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(bind(&path).await.unwrap());

        // A socket of a program without a lock file.
        let other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(bind(&path).await.unwrap_err(), io::ErrorKind::AddrInUse);
        drop(other);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "not a socket").unwrap();
        assert_eq!(bind(&path).await.unwrap_err(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "not a socket");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
