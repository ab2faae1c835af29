#include "deadline.h"

#include "debug.h"

#include <stdio.h>
#include <string.h>

static _Thread_local double thread_timeout = -1;

void mlxdist_set_timeout(double seconds) { thread_timeout = seconds; }

double deadline_for(const mlxdist_group *group) { return thread_timeout >= 0 ? thread_timeout : group->timeout; }

void mlxdist_group_set_timeout(mlxdist_group *group, double seconds) {
  engine_lock(group->engine);
  group->timeout = seconds;
  engine_unlock(group->engine);
}

double mlxdist_group_timeout(mlxdist_group *group) {
  engine_lock(group->engine);
  double seconds = group->timeout;
  engine_unlock(group->engine);
  return seconds;
}

void mlxdist_group_peer_news(mlxdist_group *group, int32_t rank, const char *text) {
  struct engine *engine = group->engine;
  if (rank < 0 || rank >= engine->size) return;
  engine_lock(engine);
  snprintf(engine->peers[rank].news, sizeof engine->peers[rank].news, "%s", text);
  engine_unlock(engine);
}

#define WAIT_BYTES 576

/* "all_sum #7 of float32 [4] for rank 0, which has not entered it (it is in all_gather #412 for 12.3 s)" */
static void describe_wait(const struct operation *operation, const struct lateness *late, char text[WAIT_BYTES]) {
  char name[192];
  layout_name(&operation->receives, operation->sequence, name, sizeof name);
  if (late->rank < 0) {
    snprintf(text, WAIT_BYTES, "%s for its own messages to leave", name);
    return;
  }
  const char *news = operation->group->engine->peers[late->rank].news;
  snprintf(text, WAIT_BYTES, "%s for rank %d, which has %s%s%s%s", name, late->rank,
           late->entered ? "entered it" : "not entered it", news[0] ? " (it is " : "", news, news[0] ? ")" : "");
}

static void notice(struct operation *operation, double waited) {
  const struct engine *engine = operation->group->engine;
  struct lateness late = operation_late(operation);
  char wait[WAIT_BYTES];
  describe_wait(operation, &late, wait);
  debug(DEBUG_WARN, "deadline", "rank %d on %s has waited %.0f s in %s", engine->rank, engine->host, waited, wait);
}

static int fail_late(const struct operation *operation, const struct lateness *late, double waited) {
  char wait[WAIT_BYTES];
  describe_wait(operation, late, wait);
  return fail(MLXDIST_TIMEOUT, "rank %d waited %.1f s in %s, without any progress; is that rank %s? "
              "MLXDIST_TIMEOUT=seconds allows more time (0: no limit)", operation->group->engine->rank, waited, wait,
              late->entered ? "stopped, or its cable pulled" : "still working, or in another operation");
}

/* 0: none. */
static double limit_of(const struct operation *operation, bool entered) {
  const mlxdist_options *options = &operation->group->engine->options;
  if (operation->timeout >= 0) return operation->timeout;
  return entered ? options->timeout : options->entry_timeout;
}

int deadline_look(struct operation *operation, uint64_t now) {
  double waited = (double)(now - operation->stuck_since_ns) * 1e-9, first = operation->group->engine->options.notice;
  if (operation->noticed_at <= 0) operation->noticed_at = first;
  if (first > 0 && waited >= operation->noticed_at) {
    notice(operation, waited);
    operation->noticed_at *= 2;
  }
  double lower = limit_of(operation, true), upper = limit_of(operation, false);
  if ((lower <= 0 || waited < lower) && (upper <= 0 || waited < upper)) return MLXDIST_OK;
  struct lateness late = operation_late(operation);
  double limit = limit_of(operation, late.entered);
  return limit > 0 && waited >= limit ? fail_late(operation, &late, waited) : MLXDIST_OK;
}

int deadline_connect(const struct engine *engine, int32_t rank, double waited) {
  double limit = thread_timeout >= 0 ? thread_timeout : engine->options.entry_timeout;
  if (limit <= 0 || waited < limit) return MLXDIST_OK;
  return fail(MLXDIST_TIMEOUT, "rank %d waited %.1f s for rank %d to connect; is that rank still there? "
              "MLXDIST_TIMEOUT=seconds allows more time (0: no limit)", engine->rank, waited, rank);
}
