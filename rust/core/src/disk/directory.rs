//! The directory of a spill file: the checks on it, and the unnamed file in it.
//!
//! The directory is opened once, without following a link, and all later calls use that descriptor:
//! the checked directory is the used directory, even if the path changes meanwhile. The file never
//! has a name that survives: the kernel frees its blocks when the process is gone, even after
//! `kill -9`. Only its owner may open it (mode 0600), because widening a tensor to the alignment of
//! direct I/O writes up to one block of neighbouring heap bytes on either side.

use std::ffi::OsStr;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, IFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::config::DirectIo;
use crate::error::{Error, ErrorKind, Result, shown_bytes};

/// A directory with less free space is refused when it is opened: the spill file takes this much at
/// its first write.
const FREE_BYTES_MIN: u64 = 64 << 20;
/// Alignment if `statx` gives none; every known device takes it.
const ALIGNMENT_DEFAULT: usize = 4096;
/// Alignment for buffered I/O. Any would do; a small alignment widens little.
const ALIGNMENT_BUFFERED: usize = 512;
/// Number of random names that are tried for a file that needs a name for a moment. Two are equal
/// once in 2^64 tries, so a second collision means that something else is wrong.
const NAMES_MAX: u32 = 16;
/// The descriptor of standard error, the last standard stream.
const STREAM_MAX: i32 = 2;
const OWNER_ONLY: Mode = Mode::RUSR.union(Mode::WUSR);
/// The magic number of btrfs for `statfs(2)`.
const BTRFS: u32 = 0x9123_683e;

/// A directory that may hold a spill file.
#[derive(Debug)]
pub struct SpillDirectory {
    /// Opened as a path only: that needs no right to read the directory.
    directory: OwnedFd,
    path: PathBuf,
    is_btrfs: bool,
}

/// An unnamed file and its properties.
#[derive(Debug)]
pub struct Opened {
    /// The file.
    pub file: OwnedFd,
    /// Multiple of every address, offset and length.
    pub alignment: usize,
    /// True if the file bypasses the page cache.
    pub is_direct: bool,
    /// The fallback that was taken, if any.
    pub fallback: Option<String>,
}

impl SpillDirectory {
    /// Opens the directory at `path`. Refuses it if offloading there could not help or not be safe.
    pub fn open(path: &Path) -> Result<Self> {
        occupy_closed_streams();
        // Without a slash or dot at the end, which would make the kernel follow a link.
        let bare = path.components().as_path();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, bare, flags, Mode::empty())
            .map_err(|errno| refuse_path(bare, errno))?;
        let mut opened = Self { directory, path: path.to_owned(), is_btrfs: false };
        opened.check_mode()?;
        opened.is_btrfs = opened.check_file_system()? == BTRFS;
        Ok(opened)
    }

    /// Makes an unnamed file here.
    pub fn create(&self, direct: DirectIo) -> Result<Opened> {
        let (file, direct_alignment, fallback) = match direct {
            DirectIo::Disabled => (self.create_unnamed(OFlags::empty())?, None, None),
            DirectIo::Required => {
                let (file, alignment) = self.create_direct()?;
                (file, Some(alignment), None)
            }
            DirectIo::Optional => match self.create_direct() {
                Ok((file, alignment)) => (file, Some(alignment), None),
                Err(error) => {
                    let fallback = format!("buffered I/O in {}: {error}", self.path.display());
                    (self.create_unnamed(OFlags::empty())?, None, Some(fallback))
                }
            },
        };
        let is_direct = direct_alignment.is_some();
        let alignment = direct_alignment.unwrap_or(ALIGNMENT_BUFFERED);
        Ok(Opened { file, alignment, is_direct, fallback })
    }

    /// The alignment of direct I/O. Some file systems accept the flag at open and use the page
    /// cache all the same, as ext4 does with `data=journal`; `statx` reports them.
    fn alignment_of(&self, file: &OwnedFd) -> Result<usize> {
        let alignment = direct_alignment(file).ok_or_else(|| {
            config(format!(
                "{} accepts direct I/O (O_DIRECT) but writes through the page cache, as ext4 does \
                 when mounted with data=journal; use a local file system without that, or \
                 direct_io='optional'",
                self.path.display()
            ))
        })?;
        if alignment > rustix::param::page_size() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} needs direct I/O aligned to {alignment} bytes, more than a page; use \
                     another directory, or direct_io='disabled'",
                    self.path.display()
                ),
            ));
        }
        Ok(alignment)
    }

    /// Refuses a directory that everyone may write to, without a sticky bit. Anybody could replace
    /// a name in it: the spill directory, or the name that a file needs for a moment.
    fn check_mode(&self) -> Result<()> {
        let facts = rustix::fs::fstat(&self.directory).map_err(|errno| self.unseen(errno))?;
        let mode = Mode::from_raw_mode(facts.st_mode);
        if mode.contains(Mode::WOTH) && !mode.contains(Mode::SVTX) {
            return Err(config(format!(
                "{shown} can be written to by everyone and has no sticky bit (mode {:04o}); run \
                 `chmod o-w {shown}`, or `chmod +t {shown}` if others need it, or pass a \
                 directory of your own",
                mode.bits(),
                shown = self.path.display()
            )));
        }
        Ok(())
    }

    /// Returns the magic number of the file system; refuses a file system that cannot help or is
    /// full.
    fn check_file_system(&self) -> Result<u32> {
        let shown = self.path.display();
        let facts = rustix::fs::fstatfs(&self.directory).map_err(|errno| self.unseen(errno))?;
        if let Some((name, reason)) = refused_file_system(facts.f_type as u64) {
            return Err(config(format!(
                "{shown} is on {name}, {reason}; use a directory on a local NVMe file system"
            )));
        }
        let free = facts.f_bavail.saturating_mul(facts.f_bsize as u64);
        if free < FREE_BYTES_MIN {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "{shown} has {} free, {} are the least; free some space",
                    shown_bytes(free),
                    shown_bytes(FREE_BYTES_MIN)
                ),
            ));
        }
        Ok(facts.f_type as u32)
    }

    /// A file that bypasses the page cache, and its alignment.
    fn create_direct(&self) -> Result<(OwnedFd, usize)> {
        let file = self.create_unnamed(OFlags::DIRECT)?;
        self.forbid_copies(&file)?;
        let alignment = self.alignment_of(&file)?;
        probe_direct(&file).map_err(|errno| {
            Error::from_io(
                format_args!(
                    "direct I/O (O_DIRECT) does not work in {}; use a local file system such as \
                     ext4 or XFS, or direct_io='optional'",
                    self.path.display()
                ),
                &errno.into(),
            )
        })?;
        Ok((file, alignment))
    }

    /// Makes btrfs write an empty file in place. Otherwise btrfs takes checksums, and for that it
    /// copies the bytes into the page cache first, even for a file opened with `O_DIRECT`.
    fn forbid_copies(&self, file: &OwnedFd) -> Result<()> {
        if !self.is_btrfs {
            return Ok(());
        }
        rustix::fs::ioctl_getflags(file)
            .and_then(|flags| rustix::fs::ioctl_setflags(file, flags | IFlags::NOCOW))
            .map_err(|errno| {
                Error::from_io(
                    format_args!(
                        "btrfs in {} writes through the page cache, because it refuses a file \
                         without copy-on-write (chattr +C); use a local file system such as ext4 \
                         or XFS, or direct_io='optional'",
                        self.path.display()
                    ),
                    &errno.into(),
                )
            })
    }

    /// An unnamed file by `O_TMPFILE`; if the file system lacks that, a file that is created and
    /// unlinked.
    fn create_unnamed(&self, extra: OFlags) -> Result<OwnedFd> {
        // With O_EXCL the file cannot get a name later either.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE | OFlags::EXCL | extra;
        match rustix::fs::openat(&self.directory, ".", flags, OWNER_ONLY) {
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => self.create_and_unlink(extra),
            created => created.and_then(|file| make_private(&file).map(|()| file)),
        }
        .map_err(|errno| self.refuse_file(extra, errno))
    }

    /// Makes a file that bypasses the page cache and has a name until `meanwhile` returns, because
    /// cuFile opens it again by its name. A process killed before that leaves the file, empty.
    pub fn create_named<T>(
        &self,
        meanwhile: impl FnOnce(&OwnedFd) -> Result<T>,
    ) -> Result<(Opened, T)> {
        let created = self.create_with_name(OFlags::DIRECT);
        let (file, name) = created.map_err(|errno| self.refuse_file(OFlags::DIRECT, errno))?;
        let done = make_private(&file)
            .map_err(|errno| self.refuse_file(OFlags::DIRECT, errno))
            .and_then(|()| self.forbid_copies(&file))
            .and_then(|()| meanwhile(&file));
        let unlinked = rustix::fs::unlinkat(&self.directory, &name, AtFlags::empty());
        let done = done?;
        unlinked.map_err(|errno| self.refuse_file(OFlags::DIRECT, errno))?;
        let alignment = self.alignment_of(&file)?;
        Ok((Opened { file, alignment, is_direct: true, fallback: None }, done))
    }

    /// A file that has a name for a moment. A process killed in that moment leaves it, empty.
    fn create_and_unlink(&self, extra: OFlags) -> rustix::io::Result<OwnedFd> {
        let (file, name) = self.create_with_name(extra)?;
        rustix::fs::unlinkat(&self.directory, &name, AtFlags::empty())?;
        make_private(&file)?;
        Ok(file)
    }

    /// A file and its name, which contains the number of the process.
    fn create_with_name(&self, extra: OFlags) -> rustix::io::Result<(OwnedFd, String)> {
        // O_EXCL does not follow a link there. O_NOFOLLOW would say the same, but it stays a flag
        // of the file, and cuFile refuses files with flags that it does not know.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL | extra;
        for _ in 0..NAMES_MAX {
            // The hasher's keys come from the kernel, so nobody can guess the name and create it
            // first.
            let random = RandomState::new().build_hasher().finish();
            let name = format!(".ssdtrain-{}-{random:016x}", std::process::id());
            match rustix::fs::openat(&self.directory, &name, flags, OWNER_ONLY) {
                Ok(file) => return Ok((file, name)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::EXIST)
    }

    fn refuse_file(&self, extra: OFlags, errno: Errno) -> Error {
        let (shown, source) = (self.path.display(), io::Error::from(errno));
        match errno {
            Errno::ACCESS | Errno::PERM | Errno::ROFS => config(format!(
                "cannot create a file in {shown}: {source}; make it writable, or pass another \
                 directory"
            )),
            Errno::INVAL if extra.contains(OFlags::DIRECT) => config(format!(
                "{shown} refuses direct I/O (O_DIRECT); use a local file system such as ext4 or \
                 XFS, or direct_io='optional'"
            )),
            Errno::MFILE => {
                let message = format!("cannot create a file in {shown}; raise `ulimit -n`");
                Error::from_io(message, &source)
            }
            _ => Error::from_io(format_args!("cannot create a file in {shown}"), &source),
        }
    }

    fn unseen(&self, errno: Errno) -> Error {
        Error::from_io(format_args!("cannot look at {}", self.path.display()), &errno.into())
    }
}

/// Makes the file private to its owner, for every umask.
fn make_private(file: &OwnedFd) -> rustix::io::Result<()> {
    rustix::fs::fchmod(file, OWNER_ONLY)
}

/// Takes the numbers of closed standard streams, so that no file, eventfd or ring gets one: other
/// code would print into it.
///
/// The numbers stay taken until the process ends, because other threads open stores, too. Each is
/// the root opened as a path only. Writing to it fails with `EBADF`, as to a closed stream.
fn occupy_closed_streams() {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    while let Ok(root) = rustix::fs::openat(CWD, "/", flags, Mode::empty())
        && root.as_raw_fd() <= STREAM_MAX
    {
        let _ = root.into_raw_fd();
    }
}

fn config(message: String) -> Error {
    Error::new(ErrorKind::Config, message)
}

/// The error for a path that cannot be opened as a directory. The look here chooses only the words.
fn refuse_path(path: &Path, errno: Errno) -> Error {
    let shown = path.display();
    let found = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty())
        .and_then(|found| Ok((FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode), found)));
    match (errno, found) {
        (Errno::NOENT, _) => {
            config(format!("{shown} does not exist; create it, or pass another directory"))
        }
        (Errno::MFILE, _) => {
            let message = format!("cannot open {shown}; raise `ulimit -n`");
            Error::from_io(message, &errno.into())
        }
        (Errno::NOTDIR | Errno::LOOP, Ok((FileType::Symlink, link))) => {
            let target = link_target(path, &link);
            config(format!(
                "{shown} is a symbolic link, which somebody may change later; pass its target: {}",
                target.display()
            ))
        }
        (Errno::NOTDIR, Ok((kind, _))) => config(format!(
            "{shown} is {}, not a directory; pass the directory it stands in",
            describe(kind)
        )),
        _ => config(format!(
            "cannot look at {shown}: {}; make it reachable, or pass another directory",
            io::Error::from(errno)
        )),
    }
}

/// The target of a link, as a path that can be passed instead of it.
fn link_target(path: &Path, link: &OwnedFd) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| {
        let target = rustix::fs::readlinkat(link, "", Vec::new()).unwrap_or_default();
        path.with_file_name(OsStr::from_bytes(target.as_bytes()))
    })
}

fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a file",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "something else",
    }
}

/// File systems that cannot hold a spill file, by the magic numbers of `statfs(2)`.
fn refused_file_system(magic: u64) -> Option<(&'static str, &'static str)> {
    const MEMORY: &str = "which is memory itself, so nothing would be saved";
    const NETWORK: &str = "which is reached over a network";
    const KERNEL: &str = "which shows the kernel and keeps no data";
    Some(match magic as u32 {
        0x0102_1994 => ("tmpfs", MEMORY),
        0x8584_58f6 => ("ramfs", MEMORY),
        0x6969 => ("NFS", NETWORK),
        0xff53_4d42 | 0xfe53_4d42 | 0x517b => ("SMB", NETWORK),
        0x0102_1997 => ("9P", NETWORK),
        0x00c3_6400 => ("Ceph", NETWORK),
        0x5346_414f | 0x6b41_4653 => ("AFS", NETWORK),
        0x0bd0_0bd0 => ("Lustre", NETWORK),
        0x9fa0 => ("proc", KERNEL),
        0x6265_6572 => ("sysfs", KERNEL),
        0x0027_e0eb | 0x6367_7270 => ("cgroup", KERNEL),
        0x1cd1 => ("devpts", KERNEL),
        0x6573_5546 => ("FUSE", "which may be a network and cannot promise direct I/O"),
        _ => return None,
    })
}

/// Sends an empty aligned direct read, because some file systems accept the flag at open and refuse
/// every request.
fn probe_direct(file: &OwnedFd) -> rustix::io::Result<()> {
    #[repr(align(4096))]
    struct Block([u8; 4096]);
    let mut block = Block([0; 4096]);
    rustix::io::pread(file, &mut block.0, 0).map(drop)
}

/// The alignment from `statx(STATX_DIOALIGN)` (Linux 6.1), or a safe guess if it is not known;
/// `None` if the file system sends direct I/O through the page cache.
fn direct_alignment(file: &OwnedFd) -> Option<usize> {
    const STATX_DIOALIGN: u32 = 0x2000;
    let wanted = StatxFlags::from_bits_retain(STATX_DIOALIGN);
    match rustix::fs::statx(file, "", rustix::fs::AtFlags::EMPTY_PATH, wanted) {
        Ok(facts) if facts.stx_mask & STATX_DIOALIGN != 0 && facts.stx_dio_offset_align == 0 => {
            None
        }
        Ok(facts) if facts.stx_mask & STATX_DIOALIGN != 0 => {
            // One alignment for addresses and lengths keeps their widening the same.
            Some(facts.stx_dio_mem_align.max(facts.stx_dio_offset_align).max(512) as usize)
        }
        _ => Some(ALIGNMENT_DEFAULT),
    }
}

#[cfg(test)]
mod tests {
    use super::{SpillDirectory, refused_file_system};
    use crate::error::ErrorKind;
    use rustix::fs::{Mode, OFlags};

    #[test]
    fn a_bad_directory_is_named() {
        let error = SpillDirectory::open("/no/such/place".as_ref()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("/no/such/place"), "{error}");
        if refused_file_system(rustix::fs::statfs("/dev/shm").unwrap().f_type as u64).is_some() {
            let error = SpillDirectory::open("/dev/shm".as_ref()).unwrap_err();
            assert!(error.to_string().contains("tmpfs"), "{error}");
        }
    }

    #[test]
    fn a_view_of_the_kernel_keeps_no_data() {
        let error = SpillDirectory::open("/proc".as_ref()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(
            error.to_string().starts_with("/proc is on proc, which shows the kernel"),
            "{error}"
        );
    }

    #[test]
    fn the_file_is_made_in_the_directory_that_was_checked() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let (checked, elsewhere) = (dir.path().join("checked"), dir.path().join("elsewhere"));
        std::fs::create_dir(&checked).unwrap();
        let directory = SpillDirectory::open(&checked).unwrap();
        // The path is a broken link by now; the descriptor still leads to the moved directory.
        std::fs::rename(&checked, &elsewhere).unwrap();
        std::os::unix::fs::symlink("/no/such/place", &checked).unwrap();
        let file = directory.create_unnamed(OFlags::empty()).unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let shown = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
        assert!(shown.starts_with(elsewhere.canonicalize().unwrap()), "{}", shown.display());
    }

    #[test]
    fn a_file_that_needs_a_name_loses_it_at_once() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let directory = SpillDirectory::open(dir.path()).unwrap();
        let file = directory.create_and_unlink(OFlags::empty()).unwrap();
        let facts = rustix::fs::fstat(&file).unwrap();
        assert_eq!(facts.st_nlink, 0);
        let others = Mode::from_raw_mode(facts.st_mode) - (Mode::RUSR | Mode::WUSR);
        assert!(others.is_empty(), "{others:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
