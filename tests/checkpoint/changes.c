// Preloaded, it sees every change below one folder, by whatever thread or library: counts them, ends or stops the process
// before the n-th (of a write half is done first), makes the file system worse, and writes all of them down.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL = 1, KILL_GROUP = 2, STOP = 3, KILL_BEHIND_PUBLISH = 4 };
enum { COPIES = 1, NO_DIRECTORY_SYNC = 2, NO_LINKS = 4 };

static char root[4096];
static long count, at, published;
static int what, worse, record = -1, moving;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void take(void) { pthread_mutex_lock(&lock); }
static void give(void) { pthread_mutex_unlock(&lock); }
static void renew(void) {  // in a fork the holder has another number
    pthread_mutex_t fresh = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    lock = fresh;
}

// before: the number of the change before which `action` comes, 0 for none; KILL_BEHIND_PUBLISH: of the move to COMPLETE
// behind which it comes. path: of the record.
void changes_arm(const char *folder, long before, int action, int how, const char *path) {
    static int forks;
    if (!forks++) pthread_atfork(take, give, renew);
    snprintf(root, sizeof root, "%s", folder);
    count = published = 0, at = before, what = action, worse = how;
    if (record >= 0) close(record);
    record = path ? REAL(open)(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666) : -1;
}
long changes_count(void) { return count; }

static int below(const char *path) {
    size_t n = strlen(root);
    return n && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}
static int of_file(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = root[0] ? readlink(link, out, 4095) : -1;
    if (n < 0) return 0;
    out[n] = 0;
    return below(out);
}
static int of_path(int directory, const char *path, char *out) {
    char from[4096] = "";
    if (!root[0]) return 0;
    if (path[0] != '/') {
        if (directory == AT_FDCWD ? !getcwd(from, sizeof from) : !of_file(directory, from)) return 0;
        if (!strcmp(path, ".")) path = "";
    }
    if ((size_t)snprintf(out, 4096, "%s%s%s", from, *from && *path ? "/" : "", path) >= 4096) return 0;
    return below(out);
}
// One more change; returns whether the process is to end behind half of it. A move that copies is one thing to sleep before.
static int due(void) {
    if (what == STOP && moving) return 0;
    if (++count != at) return 0;
    if (what == STOP) raise(SIGSTOP);
    return what == KILL || what == KILL_GROUP;
}
static void end(void) {
    kill(what == KILL_GROUP ? 0 : getpid(), SIGKILL);
    for (;;) pause();
}
static void note(const char *op, const char *a, const char *b, long offset, const void *data, size_t n) {
    if (record < 0) return;
    char head[9000];
    int m = snprintf(head, sizeof head, "%ld\t%s\t%s\t%s\t%ld\t%zu\n", count, op, a, b, offset, n);
    if (REAL(write)(record, head, m) != m || (n && REAL(write)(record, data, n) != (ssize_t)n)) abort();
}
#define CHANGE(is_below, call, ...)            \
    do {                                       \
        if (!(is_below)) return call;          \
        take();                                \
        if (due()) end();                      \
        int r_ = call, e_ = errno;             \
        if (r_ >= 0) note(__VA_ARGS__);        \
        give();                                \
        errno = e_;                            \
        return r_;                             \
    } while (0)

static int opened(int directory, const char *path, int flags, mode_t mode) {
    char a[4096];
    struct stat found;
    if (!(flags & (O_CREAT | O_TRUNC)) || !of_path(directory, path, a)) return REAL(openat)(directory, path, flags, mode);
    take();
    int was = !lstat(a, &found);
    if (due()) end();
    int r = REAL(openat)(directory, path, flags, mode), e = errno;
    if (r >= 0 && !was) note("create", a, "", 0, 0, 0);
    else if (r >= 0 && flags & O_TRUNC) note("truncate", a, "", 0, 0, 0);
    give();
    errno = e;
    return r;
}
#define MODE                                   \
    mode_t mode = 0;                           \
    if (flags & (O_CREAT | O_TMPFILE)) {       \
        va_list v;                             \
        va_start(v, flags);                    \
        mode = va_arg(v, mode_t);              \
        va_end(v);                             \
    }
int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int d, const char *path, int flags, ...) { MODE return opened(d, path, flags, mode); }
int openat64(int d, const char *path, int flags, ...) { MODE return opened(d, path, flags | O_LARGEFILE, mode); }

static ssize_t written(int fd, const void *data, size_t n, off_t offset) {
    char a[4096];
    int here = offset < 0;
    if (!of_file(fd, a)) return here ? REAL(write)(fd, data, n) : REAL(pwrite)(fd, data, n, offset);
    take();
    off_t from = here ? lseek(fd, 0, SEEK_CUR) : offset;
    int ends = due();
    ssize_t r = REAL(pwrite)(fd, data, ends ? n / 2 : n, from);
    int e = errno;
    if (r > 0) note("write", a, "", from, data, r);
    if (ends) end();
    if (r > 0 && here) lseek(fd, from + r, SEEK_SET);
    give();
    errno = e;
    return r;
}
ssize_t write(int fd, const void *data, size_t n) { return written(fd, data, n, -1); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) { return written(fd, data, n, offset); }
ssize_t pwrite64(int fd, const void *data, size_t n, off_t offset) { return written(fd, data, n, offset); }
static ssize_t gathered(int fd, const struct iovec *v, int n, off_t offset) {
    ssize_t all = 0;
    for (int i = 0; i < n; i++) {
        ssize_t r = v[i].iov_len ? written(fd, v[i].iov_base, v[i].iov_len, offset < 0 ? -1 : offset + all) : 0;
        if (r < 0) return all ? all : r;
        all += r;
        if ((size_t)r < v[i].iov_len) break;
    }
    return all;
}
ssize_t writev(int fd, const struct iovec *v, int n) { return gathered(fd, v, n, -1); }
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t offset) { return gathered(fd, v, n, offset); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off_t offset) { return gathered(fd, v, n, offset); }

int ftruncate(int fd, off_t n) {
    char a[4096];
    CHANGE(of_file(fd, a), REAL(ftruncate)(fd, n), "truncate", a, "", n, 0, 0);
}
int ftruncate64(int fd, off_t n) { return ftruncate(fd, n); }

static int synced(int fd, int (*real)(int)) {
    char a[4096];
    struct stat found;
    if (of_file(fd, a) && worse & NO_DIRECTORY_SYNC && !fstat(fd, &found) && S_ISDIR(found.st_mode)) {
        errno = EINVAL;
        return -1;
    }
    CHANGE(of_file(fd, a), real(fd), "fsync", a, "", 0, 0, 0);
}
int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }

int unlinkat(int d, const char *path, int flags) {
    char a[4096];
    CHANGE(of_path(d, path, a), REAL(unlinkat)(d, path, flags), flags & AT_REMOVEDIR ? "rmdir" : "unlink", a, "", 0, 0, 0);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int mkdirat(int d, const char *path, mode_t mode) {
    char a[4096];
    CHANGE(of_path(d, path, a), REAL(mkdirat)(d, path, mode), "mkdir", a, "", 0, 0, 0);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int symlinkat(const char *target, int d, const char *path) {
    char a[4096];
    int is_below = of_path(d, path, a);
    if (is_below && worse & NO_LINKS) {
        errno = EPERM;
        return -1;
    }
    CHANGE(is_below, REAL(symlinkat)(target, d, path), "symlink", a, target, 0, 0, 0);
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }

// A file is moved by removing the target, copying in two halves, and removing the source.
static int copied(const char *a, const char *b) {
    struct stat found, other;
    if (lstat(a, &found)) return -1;
    if (S_ISDIR(found.st_mode)) {
        errno = EXDEV;
        return -1;
    }
    if (!lstat(b, &other) && unlink(b)) return -1;
    int from = REAL(open)(a, O_RDONLY), to = open(b, O_WRONLY | O_CREAT | O_EXCL, found.st_mode & 0777), r = -1;
    char *data = malloc(found.st_size + 1);
    if (from >= 0 && to >= 0 && data && read(from, data, found.st_size) == found.st_size) {
        ssize_t half = found.st_size / 2;
        r = write(to, data, half) < 0 || write(to, data + half, found.st_size - half) < 0 ? -1 : unlink(a);
    }
    free(data);
    if (from >= 0) close(from);
    if (to >= 0) close(to);
    return r;
}
static int moved(const char *from, const char *to, const char *a, const char *b) {
    struct stat found;
    take();
    int r, is_link = !lstat(a, &found) && S_ISLNK(found.st_mode);
    if (worse & COPIES && !is_link) {
        if (what == STOP) due();
        moving++;
        r = copied(a, b);
        moving--;
    } else {
        if (due()) end();
        if (!(r = REAL(rename)(from, to))) note("rename", a, b, 0, 0, 0);
    }
    const char *name = strrchr(b, '/');
    if (!r && what == KILL_BEHIND_PUBLISH && name && !strcmp(name, "/COMPLETE") && ++published == at) end();
    int e = errno;
    give();
    errno = e;
    return r;
}
int renameat(int d, const char *from, int e, const char *to) {
    char a[4096], b[4096];
    if (!of_path(d, from, a) || !of_path(e, to, b)) return REAL(renameat)(d, from, e, to);
    return moved(from, to, a, b);
}
int rename(const char *from, const char *to) {
    char a[4096], b[4096];
    if (!of_path(AT_FDCWD, from, a) || !of_path(AT_FDCWD, to, b)) return REAL(rename)(from, to);
    return moved(from, to, a, b);
}
