/* The wall clock of a host whose time is set again and again: it jumps by days with every second of real time, back and forth, and to before 1980.
   Loaded with LD_PRELOAD. The monotonic clock stays as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static int real(clockid_t id, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return next(id, now);
}

static time_t jumped(time_t seconds) {
    static const time_t day = 86400;
    switch (seconds % 4) {
        case 0: return seconds + 400 * day;
        case 1: return seconds - 30 * day;
        case 2: return day + seconds % day; /* January 1970 */
        default: return seconds;
    }
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = real(id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec = jumped(now->tv_sec);
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
