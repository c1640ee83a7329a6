//! Decompression of gzip messages with a known size.
//!
//! The byte budget is charged with the length that the compressed message states. The functions here verify that length
//! and never produce more bytes than it. Caller: `body`.

use std::io::Read as _;

use flate2::bufread::GzDecoder;

/// Returns the uncompressed length that a gzip message states in its last four bytes (RFC 1952); `None` if it is
/// shorter.
pub fn length(packed: &[u8]) -> Option<usize> {
    packed.last_chunk().and_then(|length| usize::try_from(u32::from_le_bytes(*length)).ok())
}

/// Decompresses `packed` and appends the bytes to `unpacked`. Returns `None` if their number is not `length`; at most
/// one byte more is appended.
pub fn unpack(packed: &[u8], length: usize, unpacked: &mut Vec<u8>) -> Option<()> {
    let mut reader = GzDecoder::new(packed);
    // The byte after the last one would prove a wrong length.
    let most = u64::try_from(length).ok()?.checked_add(1)?;
    let read = reader.by_ref().take(most).read_to_end(unpacked).ok()?;
    // Bytes after the member would have stated the length.
    (read == length && reader.into_inner().is_empty()).then_some(())
}

/// Returns true if `packed` decompresses to more than `length` bytes. The bytes are discarded.
pub fn is_longer(packed: &[u8], length: usize) -> bool {
    let more = u64::try_from(length).unwrap_or(u64::MAX).saturating_add(1);
    std::io::copy(&mut GzDecoder::new(packed).take(more), &mut std::io::sink()).is_ok_and(|read| read == more)
}

#[cfg(test)]
pub mod tests {
    use std::io::Write as _;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    /// Compresses `bytes`.
    pub fn pack(bytes: &[u8]) -> Vec<u8> {
        let mut writer = GzEncoder::new(vec![], Compression::best());
        writer.write_all(bytes).unwrap();
        writer.finish().unwrap()
    }

    fn unpacked(packed: &[u8]) -> Option<Vec<u8>> {
        let mut unpacked = vec![];
        unpack(packed, length(packed)?, &mut unpacked).map(|()| unpacked)
    }

    #[test]
    fn gzip_length_trailer_is_verified() {
        let message = vec![7; 1 << 20];
        let (packed, message_bytes) = (pack(&message), message.len());
        assert!(packed.len() < 2048);
        assert_eq!(unpacked(&packed), Some(message));
        assert_eq!(unpacked(&pack(&[])), Some(vec![]));
        let with = |behind: &[u8]| [&packed, behind].concat();
        for lie in
            [with(&[0; 4]), with(&(1_u32 << 20).to_le_bytes()), with(&packed), with(&pack(&[])), packed[..9].to_vec()]
        {
            assert_eq!(unpacked(&lie), None);
        }
        for short in [&[][..], &[1], &[0; 4], &[0; 40]] {
            assert_eq!(unpacked(short), None);
        }
        assert!(is_longer(&packed, message_bytes - 1) && !is_longer(&packed, message_bytes));
        assert!(!is_longer(b"not gzip", 0) && !is_longer(&[], 0));
        let mut none = vec![];
        assert!(unpack(&packed, 100, &mut none).is_none() && none.len() <= 101);
    }
}
