#include "deadline.h"

#include "debug.h"
#include "error.h"
#include "layout.h"
#include "straggler.h"

#include <stdio.h>
#include <string.h>

void mlxdist_group_set_timeout(mlxdist_group *group, double seconds) {
  engine_lock(group->engine);
  group->timeout = seconds;
  if (group->id == 0) group->engine->stream_lane->timeout = seconds;
  engine_unlock(group->engine);
}

double mlxdist_group_timeout(mlxdist_group *group) {
  engine_lock(group->engine);
  double seconds = group->timeout;
  engine_unlock(group->engine);
  return seconds;
}

void mlxdist_group_set_peer_status(mlxdist_group *group, int32_t rank, const char *text) {
  struct engine *engine = group->engine;
  if (rank < 0 || rank >= engine->size) return;
  engine_lock(engine);
  snprintf(engine->peers[rank].status, sizeof engine->peers[rank].status, "%s", text);
  engine_unlock(engine);
}

#define WAIT_BYTES 576

/* "all_sum #7 of float32 [4] for rank 0, which has not entered it (it is in all_gather #412 for 12.3 s)" */
static void describe_wait(const struct engine *engine, const char *name, const struct straggler *late,
                          char text[WAIT_BYTES]) {
  if (late->rank < 0) {
    snprintf(text, WAIT_BYTES, "%s for its own messages to leave", name);
    return;
  }
  const char *status = engine->peers[late->rank].status;
  snprintf(text, WAIT_BYTES, "%s for rank %d, which has %s%s%s%s", name, late->rank,
           late->entered ? "entered it" : "not entered it", status[0] ? " (it is " : "", status, status[0] ? ")" : "");
}

/* "all_sum #7 of float32 [4] in group 1", whose ranks may be in another group. */
static struct layout_name name_of(const struct operation *operation) {
  struct layout_name name = layout_name(&operation->receives, operation->sequence);
  size_t length = strlen(name.text);
  snprintf(name.text + length, sizeof name.text - length, "%s", group_name(operation->group->id).text);
  return name;
}

static void warn_of_stall(const struct engine *engine, const char *name, const struct straggler *late, double waited) {
  char wait[WAIT_BYTES];
  describe_wait(engine, name, late, wait);
  debug(DEBUG_WARN, "deadline", "rank %d on %s has waited %.0f s in %s", engine->rank, engine->host, waited, wait);
}

static int fail_late(const struct engine *engine, const char *name, const struct straggler *late, double waited) {
  char wait[WAIT_BYTES], silence[ENDPOINT_SILENCE_BYTES] = "";
  describe_wait(engine, name, late, wait);
  if (late->rank >= 0) endpoint_explain_silence(&engine->peers[late->rank].endpoint, silence, sizeof silence);
  if (*silence)
    return fail(MLXDIST_TIMEOUT, "rank %d waited %.1f s in %s, without any progress; %s", engine->rank, waited, wait,
                silence);
  return fail(MLXDIST_TIMEOUT,
              "rank %d waited %.1f s in %s, without any progress; is that rank %s? "
              "MLXDIST_TIMEOUT=seconds allows more time (0: no limit)",
              engine->rank, waited, wait,
              late->entered ? "stopped, or its cable pulled" : "still working, or in another operation");
}

/* Whether it is time for a stall warning; the next one is due after twice the time. */
static bool is_stall_warning_due(const struct engine *engine, double waited, double *stall_warned_at) {
  double first = engine->options.stall_warning;
  if (*stall_warned_at <= 0) *stall_warned_at = first;
  if (first <= 0 || waited < *stall_warned_at) return false;
  *stall_warned_at *= 2;
  return true;
}

static void keep_late(struct operation *operation, double waited, uint64_t now) {
  if (waited < STRAGGLER_KEPT_S) return;
  struct late_peer *kept = &operation->group->engine->late;
  struct straggler late = operation_straggler(operation);
  if (late.rank < 0) return;
  kept->rank = late.rank;
  kept->seconds = waited;
  kept->seen_ns = now;
  kept->operation = name_of(operation);
}

/* 0: none. */
static double limit_of(const struct operation *operation, bool entered) {
  const mlxdist_options *options = &operation->group->engine->options;
  if (operation->timeout >= 0) return operation->timeout;
  return entered ? options->timeout : options->entry_timeout;
}

int deadline_check(struct operation *operation, uint64_t now) {
  const struct engine *engine = operation->group->engine;
  double waited = (double)(now - operation->stuck_since_ns) * 1e-9;
  keep_late(operation, waited, now);
  if (is_stall_warning_due(engine, waited, &operation->stall_warned_at)) {
    struct straggler late = operation_straggler(operation);
    warn_of_stall(engine, name_of(operation).text, &late, waited);
  }
  double lower = limit_of(operation, true), upper = limit_of(operation, false);
  if ((lower <= 0 || waited < lower) && (upper <= 0 || waited < upper)) return MLXDIST_OK;
  struct straggler late = operation_straggler(operation);
  double limit = limit_of(operation, late.entered);
  return limit > 0 && waited >= limit ? fail_late(engine, name_of(operation).text, &late, waited) : MLXDIST_OK;
}

int deadline_meet(const struct engine *engine, const char *operation, int32_t rank, double waited,
                  double *stall_warned_at) {
  const struct straggler late = {.rank = rank};
  if (is_stall_warning_due(engine, waited, stall_warned_at)) warn_of_stall(engine, operation, &late, waited);
  double limit = engine->options.entry_timeout;
  return limit > 0 && waited >= limit ? fail_late(engine, operation, &late, waited) : MLXDIST_OK;
}

int deadline_connect(const struct engine *engine, double operation_timeout, int32_t rank, double waited) {
  double limit = operation_timeout >= 0 ? operation_timeout : engine->options.entry_timeout;
  if (limit <= 0 || waited < limit) return MLXDIST_OK;
  return fail(MLXDIST_TIMEOUT,
              "rank %d waited %.1f s for rank %d to connect; is that rank still there? "
              "MLXDIST_TIMEOUT=seconds allows more time (0: no limit)",
              engine->rank, waited, rank);
}
