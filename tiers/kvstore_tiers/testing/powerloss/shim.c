/* The recorder: LD_PRELOADed into a process, it logs every operation on files below one directory.

   Owns the interposed calls and nothing else: each runs the real call first, then appends one record (log.py reads
   them) with the call's data and two ticks of a counter shared by all recorded processes, taken before the call began
   and after it returned. Never changes what a call does. A call that moves bytes in a way that is not followed here
   (sendfile, link...) is logged as UNSEEN, which makes the replayer refuse the log: never a silent gap.

   Environment: POWERLOSS_ROOT (a real path), POWERLOSS_LOG. The counter lies in POWERLOSS_LOG.clock. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, TRUNCATE, ALLOCATE, SYNC, RENAME, UNLINK, MKDIR, RMDIR, MARK, UNSEEN, SYNC_ALL };
enum { THROUGH = 1 }; /* flags: the data was on the medium when the call returned (O_DSYNC) */

struct record {
  uint32_t magic;
  uint16_t kind, flags;
  uint64_t start, end, inode;
  int64_t offset;
  uint32_t path_bytes, data_bytes;
} __attribute__((packed));

static uint64_t *ticks;
static int log_fd = -1;
static char root[PATH_MAX];
static size_t root_bytes;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
  void *found = dlsym(RTLD_NEXT, name);
  if (!found) {
    dprintf(2, "powerloss shim: this libc has no %s\n", name);
    abort();
  }
  return found;
}

static uint64_t tick(void) { return __atomic_fetch_add(ticks, 1, __ATOMIC_SEQ_CST); }

/* Append to a log that exists; also called by processes that were not preloaded, for their marks. 0, or errno. */
int powerloss_attach(const char *path) {
  char clock_path[PATH_MAX + 8];
  snprintf(clock_path, sizeof clock_path, "%s.clock", path);
  int clock_fd = REAL(open)(clock_path, O_RDWR | O_CLOEXEC);
  if (clock_fd < 0) return errno;
  void *shared = REAL(mmap)(NULL, sizeof *ticks, PROT_READ | PROT_WRITE, MAP_SHARED, clock_fd, 0);
  close(clock_fd);
  if (shared == MAP_FAILED) return errno;
  ticks = shared;
  int fd = REAL(open)(path, O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd < 0) return errno;
  log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900); /* out of the way of programs that close low descriptors */
  if (log_fd < 0) log_fd = fd; else close(fd);
  return 0;
}

__attribute__((constructor)) static void start(void) {
  const char *directory = getenv("POWERLOSS_ROOT"), *path = getenv("POWERLOSS_LOG");
  if (!directory || !path || strlen(directory) >= sizeof root) return;
  int error = powerloss_attach(path);
  if (error) {
    dprintf(2, "powerloss shim: cannot append to %s: %s\n", path, strerror(error));
    abort();
  }
  strcpy(root, directory);
  root_bytes = strlen(root);
}

static void append(struct record r, const char *path, const struct iovec *data, int pieces, size_t data_bytes) {
  int saved = errno;
  struct iovec whole[IOV_MAX];
  size_t left = data_bytes, total = sizeof r;
  int count = 2;
  r.magic = 0x53534c50;
  r.path_bytes = path ? strlen(path) : 0;
  r.data_bytes = data_bytes;
  whole[0] = (struct iovec){&r, sizeof r};
  whole[1] = (struct iovec){(void *)path, r.path_bytes};
  total += r.path_bytes + data_bytes;
  for (int i = 0; i < pieces && left; i++) {
    size_t part = data[i].iov_len < left ? data[i].iov_len : left;
    if (count == IOV_MAX) abort();
    whole[count++] = (struct iovec){data[i].iov_base, part};
    left -= part;
  }
  r.end = tick();
  if (REAL(writev)(log_fd, whole, count) != (ssize_t)total) {
    dprintf(2, "powerloss shim: the log could not be written\n");
    abort(); /* a log with a hole would prove nothing */
  }
  errno = saved;
}

/* -- what is watched ----------------------------------------------------------------------------------------------- */

static int is_below(const char *path) {
  return root_bytes && !strncmp(path, root, root_bytes) && (path[root_bytes] == '/' || !path[root_bytes]);
}

/* The inode of a descriptor of a file below the root; 0: not watched. */
static uint64_t watched(int fd) {
  char name[40], path[PATH_MAX];
  struct stat status;
  if (log_fd < 0 || !root_bytes) return 0;
  int saved = errno;
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(name, path, sizeof path - 1);
  uint64_t inode = 0;
  if (length > 0) {
    path[length] = 0;
    if (is_below(path) && !fstat(fd, &status)) inode = status.st_ino;
  }
  errno = saved;
  return inode;
}

/* `path` as an absolute one; whether it is watched. */
static int resolve(int at, const char *path, char out[PATH_MAX]) {
  char name[40], base[PATH_MAX];
  if (log_fd < 0 || !root_bytes || !path) return 0;
  if (path[0] == '/') {
    snprintf(out, PATH_MAX, "%s", path);
  } else {
    snprintf(name, sizeof name, "/proc/self/fd/%d", at);
    ssize_t length = readlink(at == AT_FDCWD ? "/proc/self/cwd" : name, base, sizeof base - 1);
    if (length < 0) return 0;
    base[length] = 0;
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
  }
  return is_below(out);
}

static uint64_t inode_at(const char *path) {
  struct stat status;
  int saved = errno;
  uint64_t inode = lstat(path, &status) ? 0 : status.st_ino;
  errno = saved;
  return inode;
}

static void note(int kind, uint64_t start, uint64_t inode, int64_t offset, const char *path, const char *data) {
  struct iovec piece = {(void *)data, data ? strlen(data) : 0};
  append((struct record){.kind = kind, .start = start, .inode = inode, .offset = offset}, path, &piece, 1, piece.iov_len);
}

static void unseen(int fd, const char *what) {
  if (watched(fd)) note(UNSEEN, tick(), 0, 0, what, NULL);
}

int powerloss_mark(const void *data, size_t bytes) {
  struct iovec piece = {(void *)data, bytes};
  if (log_fd < 0) return ENOTCONN;
  append((struct record){.kind = MARK, .start = tick()}, NULL, &piece, 1, bytes);
  return 0;
}

/* -- bytes --------------------------------------------------------------------------------------------------------- */

static void wrote(int fd, uint64_t inode, uint64_t start, const struct iovec *v, int n, int64_t offset, ssize_t bytes,
                  int through) {
  if (bytes <= 0) return;
  int flags = fcntl(fd, F_GETFL);
  if (offset < 0) offset = lseek(fd, 0, SEEK_CUR) - bytes;
  through = through || (flags >= 0 && (flags & O_DSYNC));
  append((struct record){.kind = WRITE, .flags = through ? THROUGH : 0, .start = start, .inode = inode, .offset = offset},
         NULL, v, n, bytes);
}

#define WRITING(fd, v, n, offset, through, call)                                   \
  uint64_t inode = watched(fd), start = inode ? tick() : 0;                        \
  ssize_t bytes = call;                                                            \
  if (inode) wrote(fd, inode, start, v, n, offset, bytes, through);                \
  return bytes

ssize_t write(int fd, const void *data, size_t size) {
  struct iovec v = {(void *)data, size};
  WRITING(fd, &v, 1, -1, 0, REAL(write)(fd, data, size));
}
ssize_t writev(int fd, const struct iovec *v, int n) { WRITING(fd, v, n, -1, 0, REAL(writev)(fd, v, n)); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  struct iovec v = {(void *)data, size};
  WRITING(fd, &v, 1, at, 0, REAL(pwrite)(fd, data, size, at));
}
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t at) {
  WRITING(fd, v, n, at, 0, REAL(pwritev)(fd, v, n, at));
}
ssize_t pwritev2(int fd, const struct iovec *v, int n, off_t at, int flags) {
  WRITING(fd, v, n, at, flags & (RWF_DSYNC | RWF_SYNC), REAL(pwritev2)(fd, v, n, at, flags));
}
ssize_t pwrite64(int fd, const void *d, size_t s, off64_t at) { return pwrite(fd, d, s, at); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t at) { return pwritev(fd, v, n, at); }
ssize_t pwritev64v2(int fd, const struct iovec *v, int n, off64_t at, int f) { return pwritev2(fd, v, n, at, f); }

int ftruncate(int fd, off_t size) {
  uint64_t inode = watched(fd), start = inode ? tick() : 0;
  int result = REAL(ftruncate)(fd, size);
  if (inode && !result) note(TRUNCATE, start, inode, size, NULL, NULL);
  return result;
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

int truncate(const char *path, off_t size) {
  char full[PATH_MAX];
  int seen = resolve(AT_FDCWD, path, full);
  uint64_t start = seen ? tick() : 0;
  int result = REAL(truncate)(path, size);
  if (seen && !result) note(TRUNCATE, start, inode_at(full), size, NULL, NULL);
  return result;
}
int truncate64(const char *path, off64_t size) { return truncate(path, size); }

int posix_fallocate(int fd, off_t offset, off_t size) {
  uint64_t inode = watched(fd), start = inode ? tick() : 0;
  int result = REAL(posix_fallocate)(fd, offset, size);
  if (inode && !result) note(ALLOCATE, start, inode, offset + size, NULL, NULL);
  return result;
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }

int fallocate(int fd, int mode, off_t offset, off_t size) {
  uint64_t inode = watched(fd), start = inode ? tick() : 0;
  int result = REAL(fallocate)(fd, mode, offset, size);
  if (inode && !result) {
    if (!mode) note(ALLOCATE, start, inode, offset + size, NULL, NULL);
    else if (mode != FALLOC_FL_KEEP_SIZE) unseen(fd, "fallocate with a mode");
  }
  return result;
}
int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return fallocate(fd, mode, offset, size); }

/* -- syncs --------------------------------------------------------------------------------------------------------- */

#define SYNCING(fd, call)                                      \
  uint64_t inode = watched(fd), start = inode ? tick() : 0;    \
  int result = call;                                           \
  if (inode && !result) note(SYNC, start, inode, 0, NULL, NULL); \
  return result

int fsync(int fd) { SYNCING(fd, REAL(fsync)(fd)); }
int fdatasync(int fd) { SYNCING(fd, REAL(fdatasync)(fd)); }

void sync(void) {
  uint64_t start = root_bytes ? tick() : 0;
  REAL(sync)();
  if (root_bytes) note(SYNC_ALL, start, 0, 0, NULL, NULL);
}

int syncfs(int fd) {
  uint64_t start = root_bytes ? tick() : 0;
  int result = REAL(syncfs)(fd);
  if (watched(fd) && !result) note(SYNC_ALL, start, 0, 0, NULL, NULL);
  return result;
}

/* -- names --------------------------------------------------------------------------------------------------------- */

static int opened(int at, const char *path, int flags, mode_t mode, int is_at) {
  char full[PATH_MAX];
  int seen = (flags & (O_CREAT | O_TRUNC)) && resolve(at, path, full);
  uint64_t before = seen ? inode_at(full) : 0, start = seen ? tick() : 0;
  int fd = is_at ? REAL(openat)(at, path, flags, mode) : REAL(open)(path, flags, mode);
  if (seen && fd >= 0) {
    uint64_t inode = inode_at(full);
    if (!before) note(CREATE, start, inode, 0, full, NULL);
    else if (flags & O_TRUNC) note(TRUNCATE, start, inode, 0, NULL, NULL);
  }
  return fd;
}

#define MODE(flags)                     \
  mode_t mode = 0;                      \
  if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list rest;                       \
    va_start(rest, flags);              \
    mode = va_arg(rest, mode_t);        \
    va_end(rest);                       \
  }

int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode, 0); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode, 0); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) return opened(at, path, flags, mode, 1); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) return opened(at, path, flags | O_LARGEFILE, mode, 1); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode, 0); }

int renameat(int from_at, const char *from, int to_at, const char *to) {
  char old[PATH_MAX], new[PATH_MAX];
  int seen = resolve(from_at, from, old), arrives = resolve(to_at, to, new);
  uint64_t inode = seen ? inode_at(old) : 0, start = seen || arrives ? tick() : 0;
  int result = REAL(renameat)(from_at, from, to_at, to);
  if (!result && seen && arrives) note(RENAME, start, inode, 0, old, new);
  else if (!result && (seen || arrives)) note(UNSEEN, start, 0, 0, "rename across the recorded directory's border", NULL);
  return result;
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

static int removed(int at, const char *path, int flags) {
  char full[PATH_MAX];
  int seen = resolve(at, path, full);
  uint64_t inode = seen ? inode_at(full) : 0, start = seen ? tick() : 0;
  int result = REAL(unlinkat)(at, path, flags);
  if (seen && !result) note(flags & AT_REMOVEDIR ? RMDIR : UNLINK, start, inode, 0, full, NULL);
  return result;
}
int unlinkat(int at, const char *path, int flags) { return removed(at, path, flags); }
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int at, const char *path, mode_t mode) {
  char full[PATH_MAX];
  int seen = resolve(at, path, full);
  uint64_t start = seen ? tick() : 0;
  int result = REAL(mkdirat)(at, path, mode);
  if (seen && !result) note(MKDIR, start, inode_at(full), 0, full, NULL);
  return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* -- shared mappings: what changed is seen at msync and munmap, page by page, against a copy ----------------------- */

enum { MAPPINGS = 64, PAGE = 4096 };
static struct mapping {
  char *address, *copy, path[PATH_MAX];
  size_t bytes;
  off_t offset;
  uint64_t inode;
} mappings[MAPPINGS];
static pthread_mutex_t mapping_lock = PTHREAD_MUTEX_INITIALIZER;

void *mmap(void *hint, size_t bytes, int protection, int flags, int fd, off_t offset) {
  uint64_t inode = fd >= 0 && (flags & MAP_SHARED) && (protection & PROT_WRITE) ? watched(fd) : 0;
  char *address = REAL(mmap)(hint, bytes, protection, flags, fd, offset);
  if (!inode || address == MAP_FAILED) return address;
  struct mapping *free_one = NULL;
  pthread_mutex_lock(&mapping_lock);
  for (int i = 0; i < MAPPINGS && !free_one; i++)
    if (!mappings[i].address) free_one = &mappings[i];
  char *copy = REAL(mmap)(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (!free_one || copy == MAP_FAILED) {
    unseen(fd, "one more shared mapping than the recorder follows");
  } else {
    struct stat status;
    char name[40];
    if (!fstat(fd, &status) && status.st_size > offset) {
      size_t there = status.st_size - offset;
      memcpy(copy, address, there < bytes ? there : bytes);
    }
    *free_one = (struct mapping){.address = address, .copy = copy, .bytes = bytes, .offset = offset, .inode = inode};
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    if (readlink(name, free_one->path, PATH_MAX - 1) < 0) free_one->path[0] = 0;
  }
  pthread_mutex_unlock(&mapping_lock);
  return address;
}
void *mmap64(void *hint, size_t bytes, int p, int f, int fd, off64_t at) { return mmap(hint, bytes, p, f, fd, at); }

static uint64_t note_changes(char *from, size_t bytes, int ending) {
  uint64_t inode = 0;
  struct stat status;
  pthread_mutex_lock(&mapping_lock);
  for (struct mapping *m = mappings; m < mappings + MAPPINGS; m++) {
    if (!m->address || from + bytes <= m->address || from >= m->address + m->bytes) continue;
    inode = m->inode;
    int gone = lstat(m->path, &status) || status.st_ino != inode || status.st_size <= m->offset;
    size_t length = gone ? 0 : status.st_size - m->offset; /* by name: a second descriptor would end its locks */
    if (length > m->bytes) length = m->bytes;
    for (size_t at = 0; at < length; at += PAGE) {
      size_t part = length - at < PAGE ? length - at : PAGE;
      if (m->address + at + part <= from || m->address + at >= from + bytes) continue;
      if (!memcmp(m->address + at, m->copy + at, part)) continue;
      memcpy(m->copy + at, m->address + at, part);
      struct iovec piece = {m->copy + at, part};
      append((struct record){.kind = WRITE, .start = tick(), .inode = inode, .offset = m->offset + at}, NULL, &piece, 1,
             part);
    }
    if (ending) {
      REAL(munmap)(m->copy, m->bytes);
      m->address = NULL;
    }
  }
  pthread_mutex_unlock(&mapping_lock);
  return inode;
}

int msync(void *address, size_t bytes, int flags) {
  uint64_t inode = root_bytes ? note_changes(address, bytes, 0) : 0, start = inode ? tick() : 0;
  int result = REAL(msync)(address, bytes, flags);
  if (inode && !result && (flags & MS_SYNC)) note(SYNC, start, inode, 0, NULL, NULL);
  return result;
}

int munmap(void *address, size_t bytes) {
  if (root_bytes) note_changes(address, bytes, 1);
  return REAL(munmap)(address, bytes);
}

/* -- what is not followed ------------------------------------------------------------------------------------------ */

ssize_t sendfile64(int to, int from, off64_t *at, size_t n) { unseen(to, "sendfile"); return REAL(sendfile64)(to, from, at, n); }
ssize_t splice(int from, off64_t *a, int to, off64_t *b, size_t n, unsigned f) {
  unseen(to, "splice");
  return REAL(splice)(from, a, to, b, n, f);
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t n, unsigned f) {
  unseen(to, "copy_file_range");
  return REAL(copy_file_range)(from, a, to, b, n, f);
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
  char full[PATH_MAX];
  if (resolve(b, to, full)) note(UNSEEN, tick(), 0, 0, "link", NULL);
  return REAL(linkat)(a, from, b, to, flags);
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
int symlinkat(const char *target, int at, const char *path) {
  char full[PATH_MAX];
  if (resolve(at, path, full)) note(UNSEEN, tick(), 0, 0, "symlink", NULL);
  return REAL(symlinkat)(target, at, path);
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }
