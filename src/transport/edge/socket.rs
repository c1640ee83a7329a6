//! Where an instance listens: at a port, or at a file that is a socket.

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

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// At the first of these addresses that can be had: a name may have several.
    Tcp(Vec<SocketAddr>),
    /// At this file.
    Unix(PathBuf),
}

impl From<SocketAddr> for Listen {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(vec![address])
    }
}

impl fmt::Display for Listen {
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

/// Takes connections.
#[derive(Debug)]
pub enum Listener {
    /// At a port.
    Tcp(TcpListener),
    /// At a file.
    Unix(UnixSocket),
}

/// A file that is a socket, for as long as this lives.
#[derive(Debug)]
pub struct UnixSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Locked: whoever has it owns the file at `path`.
    _lock: File,
}

impl Listener {
    /// Takes the address.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if somebody else has it; whatever else the system says.
    pub async fn bind(listen: &Listen) -> io::Result<Self> {
        match listen {
            Listen::Tcp(addresses) => Ok(Self::Tcp(TcpListener::bind(addresses.as_slice()).await?)),
            Listen::Unix(path) => Ok(Self::Unix(UnixSocket::bind(path).await?)),
        }
    }

    /// Where it listens, as a client is told it.
    pub fn address(&self) -> io::Result<Listen> {
        match self {
            Self::Tcp(listener) => Ok(listener.local_addr()?.into()),
            Self::Unix(socket) => Ok(Listen::Unix(socket.path.clone())),
        }
    }

    /// The next connection, and who is at its other end.
    pub async fn accept(&self) -> io::Result<(Stream, PeerAddress)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                Ok((Stream::Tcp(stream), PeerAddress(Some(address))))
            }
            Self::Unix(socket) => Ok((Stream::Unix(socket.listener.accept().await?.0), PeerAddress(None))),
        }
    }
}

impl UnixSocket {
    /// A file that a process left behind that is gone is replaced; one where somebody answers, and one that is no socket, is not.
    async fn bind(path: &Path) -> io::Result<Self> {
        let mut lock = path.as_os_str().to_owned();
        lock.push(".lock");
        // Two that start at the same time would each take the other's file for one that was left behind.
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

/// Whether the file is a socket at which nobody answers.
async fn is_left_behind(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket && UnixStream::connect(path).await.is_err_and(refused)
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        // If it stays, the next one to listen there replaces it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Who is at the other end of a connection: an address, or somebody on this machine.
#[derive(Debug, Clone, Copy)]
pub struct PeerAddress(Option<SocketAddr>);

impl PeerAddress {
    /// Without its port; `None` for somebody on this machine.
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

/// What a caller's bytes come and go on.
#[derive(Debug)]
pub enum Stream {
    /// From a port.
    Tcp(TcpStream),
    /// From a file.
    Unix(UnixStream),
}

impl Stream {
    /// Has small packets sent at once.
    pub fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nodelay(true),
            Self::Unix(_) => Ok(()),
        }
    }
}

/// The same call of whichever it is.
macro_rules! either {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream.get_mut() {
            Stream::Tcp(inner) => {
                let $inner = Pin::new(inner);
                $call
            }
            Stream::Unix(inner) => {
                let $inner = Pin::new(inner);
                $call
            }
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_read(cx, buffer))
    }
}

impl AsyncWrite for Stream {
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
        Listener::bind(&Listen::Unix(path.to_owned())).await.map_err(|error| error.kind())
    }

    #[tokio::test]
    async fn a_socket_that_was_left_behind_is_replaced_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("linkis-rm-socket-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("rm.sock");
        let first = bind(&path).await.unwrap();
        assert_eq!(first.address().unwrap().to_string(), format!("unix:{}", path.display()));
        assert_eq!(bind(&path).await.unwrap_err(), io::ErrorKind::AddrInUse, "another instance has it");
        drop(first);
        assert!(!path.exists(), "it goes with its listener");

        // As after kill -9.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(bind(&path).await.unwrap());

        // Another program's, which knows nothing of the lock.
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
