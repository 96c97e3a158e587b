/* Faults of a host, in one process: the wall clock is wrong, and writes to files below SOAK_FOLDER fail or are slow.
   Loaded with LD_PRELOAD. What is wrong now stands in the file SOAK_CONTROL, three numbers of 64 bits. The monotonic clock stays as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    volatile int64_t clock_s;   /* added to the wall clock */
    volatile int64_t no_space;  /* not 0: writes fail with ENOSPC */
    volatile int64_t write_us;  /* by which each write is delayed */
};

static struct control nothing, *control = &nothing;
static const char *folder = "";

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("SOAK_CONTROL"), *below = getenv("SOAK_FOLDER");
    int fd = path && below ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) return;
    folder = below;
    control = mapped;
}

/* Delay a write to a file of the folder; return whether it is to fail. */
static int fails(int fd) {
    char link[64], path[4096];
    if (!control->no_space && !control->write_us) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder)) != 0) return 0;
    if (control->write_us) usleep(control->write_us);
    if (control->no_space) errno = ENOSPC;
    return control->no_space != 0;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    return fails(fd) ? -1 : real(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    return fails(fd) ? -1 : real(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    return fails(fd) ? -1 : real(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    return fails(fd) ? -1 : real(fd, parts, count);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    REAL(clock_gettime);
    int failed = real(id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += control->clock_s;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}
