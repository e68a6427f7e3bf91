/* One scenario a run: `team_stress NAME`. Exit 0 if all was well, 1 with a line on stderr if not. See test_team.py. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "team.h"

#define MOST_JOBS 1000
#define MOST_THREADS 16

static void fail(const char *what, int64_t seen) {
    fprintf(stderr, "%s: %lld\n", what, (long long)seen);
    exit(1);
}

/* Plain memory on purpose: two threads on one job, or on one seat, are a race that a sanitizer sees. */
typedef struct {
    int64_t count, turns_of_job; /* turns: job n takes n % 7 times as many */
    int times[MOST_JOBS], done_by_seat[MOST_THREADS];
} tally;

static void count_some(void *context, int64_t first, int64_t end, int seat) {
    tally *all = context;
    if (first < 0 || end > all->count || first >= end) fail("jobs that there are not", first);
    if (seat < 0 || seat >= MOST_THREADS) fail("a seat that there is not", seat);
    for (int64_t job = first; job < end; job++) {
        for (volatile int64_t turn = 0; turn < all->turns_of_job * (job % 7); turn++) continue;
        all->times[job]++;
        all->done_by_seat[seat]++;
    }
}

static void run_and_check(int64_t count, int num_threads, int64_t turns_of_job) {
    tally all = {.count = count, .turns_of_job = turns_of_job};
    int64_t done = 0;
    team_run(count_some, &all, count, num_threads);
    for (int64_t job = 0; job < count; job++)
        if (all.times[job] != 1) fail("a job not done once", job);
    for (int seat = 0; seat < MOST_THREADS; seat++) {
        done += all.done_by_seat[seat];
        if (seat >= num_threads && all.done_by_seat[seat]) fail("more threads than were asked for", seat);
    }
    if (done != count) fail("jobs done", done);
}

static void tiny(void) {
    for (int i = 0; i < 30000; i++) run_and_check(i % 9, 1 + i % 4, 0);
}

static void uneven(void) {
    for (int i = 0; i < 200; i++) run_and_check(i % 41, 2 + i % 2, 20000);
}

static void many_threads(void) {
    for (int i = 0; i < 300; i++) run_and_check(MOST_JOBS - i, MOST_THREADS, 50);
}

static void *call_often(void *unused) {
    for (int i = 0; i < 5000; i++) run_and_check(i % 50, 3, 10);
    return unused;
}

static void callers(void) {
    pthread_t thread[4];
    for (int i = 0; i < 4; i++) pthread_create(&thread[i], 0, call_often, 0);
    for (int i = 0; i < 4; i++) pthread_join(thread[i], 0);
}

/* Children of a process whose other thread is in the middle of a call. */
static void forked(void) {
    pthread_t thread;
    pthread_create(&thread, 0, call_often, 0);
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (!child) {
            for (int j = 0; j < 200; j++) run_and_check(20, 3, 10);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        if (status) fail("a child's status", status);
        run_and_check(20, 3, 10);
    }
    pthread_join(thread, 0);
}

static int64_t processor_us(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    struct timeval user = used.ru_utime, system = used.ru_stime;
    return (user.tv_sec + system.tv_sec) * INT64_C(1000000) + user.tv_usec + system.tv_usec;
}

static void sleep_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, 0);
}

/* After many calls. The best of three: a pause of the machine in the middle of a spin may count as its work. */
static void check_work_us(void (*what)(void), int64_t most_us) {
    int64_t work_us = 0;
    for (int attempt = 0; attempt < 3; attempt++) {
        for (int i = 0; i < 1000; i++) run_and_check(20, 3, 100);
        int64_t before_us = processor_us();
        what();
        work_us = processor_us() - before_us;
        if (work_us <= most_us) return;
    }
    fail("microseconds of work", work_us);
}

static void nothing(void) { sleep_ms(500); }

/* Nobody works: within a millisecond nobody spins. */
static void idle(void) { check_work_us(nothing, 10000); }

static void a_few_calls(void) {
    for (int i = 0; i < 20; i++, sleep_ms(10)) run_and_check(20, 3, 1);
}

/* Calls too far apart to be spun through: a millisecond of spins at most for each of 40 members' waits. */
static void sparse(void) { check_work_us(a_few_calls, 40000); }

/* The process ends while others are in the middle of a call. */
static void exits(void) {
    pthread_t thread;
    for (int i = 0; i < 2; i++) pthread_create(&thread, 0, call_often, 0);
    sleep_ms(20);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } scenarios[] = {{"tiny", tiny},     {"uneven", uneven}, {"many_threads", many_threads}, {"callers", callers},
                     {"forked", forked}, {"idle", idle},     {"sparse", sparse},             {"exits", exits}};
    for (size_t i = 0; argc == 2 && i < sizeof scenarios / sizeof *scenarios; i++)
        if (!strcmp(argv[1], scenarios[i].name)) return scenarios[i].run(), 0;
    fprintf(stderr, "which scenario?\n");
    return 2;
}
