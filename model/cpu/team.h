/* Threads that wait between kernels, and how a kernel shares its work with them. Must not know: what the work is.
 *
 * A kernel's work is `count` jobs, numbered from 0. Each thread that takes part takes the next few until none are left,
 * so that a thread that is late or never comes delays no other. Which thread does which job is not determined.
 */

#ifndef OCTAVO_TEAM_H
#define OCTAVO_TEAM_H

#include <stdint.h>

/* Does jobs first to end - 1. seat: number of the thread, 0 <= seat < num_threads; never the same for two at once. */
typedef void (*team_jobs)(void *context, int64_t first, int64_t end, int seat);

/* Runs all jobs; returns when they are done. The caller works too, with at most num_threads - 1 others. Any number of
 * threads may call at once: the team helps one of them, the others work alone. Safe after a fork. */
void team_run(team_jobs jobs, void *context, int64_t count, int num_threads);

#endif
