/* The team: threads that are started when first needed, and wait by spinning while that pays off, else asleep.
 *
 * Waking a sleeping thread takes longer than most kernels of a decode step, so a member spins for a while after each
 * kernel. If other processes need the cores, spinning would take a core from one with work, perhaps from the very
 * thread that the member waits for. So a member compares the time that passed while it was awake with the processor
 * time that it got, and if much is missing the whole team stops spinning for a while: a truce, each twice as long as
 * the last if it comes soon after that. When waits become too long to spin through, spins are shortened.
 *
 * All of a kernel's progress is in one word: jobs left, threads at work, threads allowed. Jobs are taken by compare and
 * exchange, which also counts the taker as at work; the kernel's description stays unchanged until all have left.
 *
 * Must not know: what the jobs do.
 */

#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#ifdef __x86_64__
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

#define MOST_MEMBERS 255
#define MOST_JOBS INT32_MAX
#define TURNS 32                  /* iterations of a spin between two looks at the clock */
#define SHORTEST_SPIN_NS 5000
#define LONGEST_SPIN_NS 200000    /* kernels of a step are some 20 microseconds apart, steps some hundred */
#define LEAVING_SPIN_NS 50000     /* wait for the last jobs: they take microseconds, waking up takes some fifty */
#define LOOK_EVERY_NS 8000000     /* more than another process needs for one message, less than a few time slices */
#define SHORTEST_TRUCE_NS 16000000
#define LONGEST_TRUCE_NS 512000000
#define PEACE_NS 128000000        /* after so long without a truce, the next is a short one */

/* Where one thread sleeps. */
typedef struct {
    atomic_int is_asleep;
    pthread_mutex_t lock;
    pthread_cond_t woken;
} bed;

/* When a member last compared its times: wall-clock time, moved on by the time that it has slept since, and its own
 * processor time. */
typedef struct {
    int64_t wall_ns, given_ns;
} watch;

static struct {
    _Alignas(64) atomic_uint_fast64_t progress; /* bits: jobs left 32 · at work 16 · allowed, with the caller 16 */
    _Alignas(64) team_jobs jobs;
    void *context;
    int64_t count;
    _Alignas(64) atomic_int_fast64_t truce_ns, truce_end_ns;
    atomic_flag is_taken;
    int num_members;
    bed callers, members[MOST_MEMBERS];
} team;

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* ---------------------------------------------------------------- progress */

#define ONE_AT_WORK (UINT64_C(1) << 32)

static inline uint64_t left(uint64_t progress) { return progress & UINT32_MAX; }
static inline uint64_t at_work(uint64_t progress) { return progress >> 32 & UINT16_MAX; }
static inline uint64_t seats(uint64_t progress) { return progress >> 48; }

static inline int has_jobs(int seat) {
    uint64_t now = atomic_load(&team.progress);
    return left(now) && (uint64_t)seat < seats(now);
}

/* Takes the next jobs: many at first, single ones at the end, since all wait for the last one. joining: ONE_AT_WORK for
 * a thread's first jobs, else 0. Returns 0 if there are none for this seat. */
static inline int take(uint64_t joining, int seat, int64_t *first, int64_t *end) {
    uint64_t now = atomic_load(&team.progress), some;
    do {
        if (!left(now) || (uint64_t)seat >= seats(now)) return 0;
        some = (left(now) + 2 * seats(now) - 1) / (2 * seats(now));
    } while (!atomic_compare_exchange_weak(&team.progress, &now, now - some + joining));
    *first = team.count - (int64_t)left(now);
    *end = *first + (int64_t)some;
    return 1;
}

/* ---------------------------------------------------------------- sleep */

static int64_t clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Before this, the caller has set is_asleep and then checked once more for what it waits for. */
static void sleep_until_woken(bed *in) {
    pthread_mutex_lock(&in->lock);
    while (atomic_load(&in->is_asleep)) pthread_cond_wait(&in->woken, &in->lock);
    pthread_mutex_unlock(&in->lock);
}

/* Costs only a load if the thread is awake. May be late and wake a thread for nothing. */
static inline void wake(bed *of) {
    if (!atomic_load(&of->is_asleep)) return;
    pthread_mutex_lock(&of->lock);
    atomic_store(&of->is_asleep, 0);
    pthread_cond_signal(&of->woken);
    pthread_mutex_unlock(&of->lock);
}

static void sleep_for_jobs(int seat) {
    bed *mine = &team.members[seat - 1];
    atomic_store(&mine->is_asleep, 1);
    if (has_jobs(seat)) atomic_store(&mine->is_asleep, 0);
    else sleep_until_woken(mine);
}

/* ---------------------------------------------------------------- spinning */

static inline int64_t within(int64_t least, int64_t x, int64_t most) { return x < least ? least : x > most ? most : x; }

static void call_truce(int64_t now_ns) {
    int64_t peace_ns = now_ns - atomic_load(&team.truce_end_ns);
    if (peace_ns < 0) return;
    int64_t longer_ns = peace_ns < PEACE_NS ? 2 * atomic_load(&team.truce_ns) : 0;
    int64_t truce_ns = within(SHORTEST_TRUCE_NS, longer_ns, LONGEST_TRUCE_NS);
    atomic_store(&team.truce_ns, truce_ns);
    atomic_store(&team.truce_end_ns, now_ns + truce_ns);
}

/* Whether to spin: not during a truce. Calls one if other processes had more than an eighth of the time. */
static int may_spin(watch *last, int64_t now_ns) {
    int64_t passed_ns = now_ns - last->wall_ns;
    if (passed_ns > LOOK_EVERY_NS) {
        int64_t given_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        if (passed_ns - (given_ns - last->given_ns) > passed_ns / 8) call_truce(now_ns);
        *last = (watch){now_ns, given_ns};
    }
    return now_ns >= atomic_load(&team.truce_end_ns);
}

/* Returns whether jobs came while spinning. */
static int spin_for_jobs(int seat, int64_t start_ns, int64_t spin_ns) {
    do {
        for (int i = 0; i < TURNS; i++) {
            if (has_jobs(seat)) return 1;
            RELAX();
        }
    } while (clock_ns(CLOCK_MONOTONIC) - start_ns < spin_ns);
    return 0;
}

/* A wait that is short enough to spin through makes the next spin longer, even if this one slept; a longer wait makes
 * it shorter. */
static void wait_for_jobs(int seat, watch *last, int64_t *spin_ns) {
    int64_t start_ns = clock_ns(CLOCK_MONOTONIC);
    int pays = may_spin(last, start_ns) && spin_for_jobs(seat, start_ns, *spin_ns);
    if (!pays) {
        int64_t asleep_ns = clock_ns(CLOCK_MONOTONIC);
        sleep_for_jobs(seat);
        int64_t awake_ns = clock_ns(CLOCK_MONOTONIC);
        last->wall_ns += awake_ns - asleep_ns;
        pays = awake_ns - start_ns < LONGEST_SPIN_NS;
    }
    *spin_ns = within(SHORTEST_SPIN_NS, pays ? 2 * *spin_ns : *spin_ns / 2, LONGEST_SPIN_NS);
}

/* Spins, then sleeps: a member that lost its core in the middle of a job gets one sooner if the caller gives up its
 * own. */
static void wait_for_others(void) {
    int64_t start_ns = clock_ns(CLOCK_MONOTONIC);
    do {
        for (int i = 0; i < TURNS; i++) {
            if (!at_work(atomic_load(&team.progress))) return;
            RELAX();
        }
    } while (clock_ns(CLOCK_MONOTONIC) - start_ns < LEAVING_SPIN_NS);
    while (at_work(atomic_load(&team.progress))) {
        atomic_store(&team.callers.is_asleep, 1);
        if (at_work(atomic_load(&team.progress))) sleep_until_woken(&team.callers);
        else atomic_store(&team.callers.is_asleep, 0);
    }
}

/* ---------------------------------------------------------------- members */

static void *be_member(void *argument) {
    int seat = (int)(intptr_t)argument;
    int64_t first, end, spin_ns = LONGEST_SPIN_NS;
    watch last = {clock_ns(CLOCK_MONOTONIC), clock_ns(CLOCK_THREAD_CPUTIME_ID)};
    for (;;) {
        wait_for_jobs(seat, &last, &spin_ns);
        if (!take(ONE_AT_WORK, seat, &first, &end)) continue;
        do team.jobs(team.context, first, end, seat);
        while (take(0, seat, &first, &end));
        if (at_work(atomic_fetch_sub(&team.progress, ONE_AT_WORK)) == 1) wake(&team.callers);
    }
    return 0;
}

static void make_bed(bed *in) {
    atomic_init(&in->is_asleep, 0);
    pthread_mutex_init(&in->lock, 0);
    pthread_cond_init(&in->woken, 0);
}

/* The initial state, also for the child after a fork: it has none of the members' threads, whatever they were doing. */
static void begin(void) {
    atomic_init(&team.progress, 0);
    atomic_flag_clear(&team.is_taken);
    team.num_members = 0;
    make_bed(&team.callers);
    for (int i = 0; i < MOST_MEMBERS; i++) make_bed(&team.members[i]);
}

static void begin_once(void) {
    begin();
    pthread_atfork(0, 0, begin);
}

/* Starts members until there are `wanted`, if possible. Returns how many may be used, at most `wanted`. Members block
 * all signals. */
static int recruit(int wanted) {
    if (wanted > MOST_MEMBERS) wanted = MOST_MEMBERS;
    if (wanted <= team.num_members) return wanted;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; team.num_members < wanted; team.num_members++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, be_member, (void *)(intptr_t)(team.num_members + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return team.num_members;
}

/* ---------------------------------------------------------------- callers */

static void run_together(team_jobs jobs, void *context, int64_t count, int num_members) {
    int64_t first, end;
    team.jobs = jobs, team.context = context, team.count = count;
    atomic_store(&team.progress, (uint64_t)(num_members + 1) << 48 | ONE_AT_WORK | (uint64_t)count);
    for (int i = 0; i < num_members; i++) wake(&team.members[i]);
    while (take(0, 0, &first, &end)) jobs(context, first, end, 0);
    atomic_fetch_sub(&team.progress, ONE_AT_WORK);
    wait_for_others();
}

void team_run(team_jobs jobs, void *context, int64_t count, int num_threads) {
    if (num_threads > count) num_threads = (int)count;
    if (num_threads > 1 && count <= MOST_JOBS) {
        pthread_once(&once, begin_once);
        if (!atomic_flag_test_and_set(&team.is_taken)) {
            run_together(jobs, context, count, recruit(num_threads - 1));
            atomic_flag_clear(&team.is_taken);
            return;
        }
    }
    if (count > 0) jobs(context, 0, count, 0);
}
