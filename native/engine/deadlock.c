#include "deadlock.h"

#include "engine.h"
#include "layout.h"
#include "operation.h"
#include "steady_clock.h"
#include "straggler.h"
#include "thread.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static uint64_t own_ident(void) {
  pthread_t self = pthread_self(); /* a number or a pointer */
  uint64_t ident = 0;
  memcpy(&ident, &self, sizeof self < sizeof ident ? sizeof self : sizeof ident);
  return ident;
}

/* The entry of a thread, or one that is free for it. One that waits in two places has none for the second, and counts
 * as one that may go on: Python runs handlers of signals in the middle of a wait. */
static struct deadlock_thread *find(struct engine *engine, uint64_t thread) {
  struct deadlock_thread *unused = 0;
  for (uint32_t i = 0; i < MLXDIST_THREADS; i++) {
    struct deadlock_thread *entry = &engine->threads[i];
    if (entry->thread == thread && entry->operation) {
      entry->timed = true;
      return 0;
    }
    if (entry->thread == thread) return entry;
    if (!entry->thread) return entry;
  }
  for (uint32_t i = 0; i < MLXDIST_THREADS && !unused; i++) {
    struct deadlock_thread *entry = &engine->threads[engine->next_thread++ % MLXDIST_THREADS];
    if (!entry->operation) unused = entry;
  }
  return unused;
}

struct deadlock_thread *deadlock_enter(const struct operation *operation, bool timed) {
  static _Thread_local uint64_t id;
  if (!id) id = thread_id();
  uint64_t thread = own_ident();
  struct deadlock_thread *entry = find(operation->group->engine, thread);
  if (entry) *entry = (struct deadlock_thread){thread, operation, timed, id};
  return entry;
}

/* " in group 1 (ranks 0, 2)" */
struct group_ranks {
  char text[96]; /* has room for eight ranks */
};
static struct group_ranks name_group(const mlxdist_group *group) {
  struct group_ranks name = {" in the world"};
  const size_t bytes = sizeof name.text;
  if (!(group->id & ~GROUP_INTERNAL)) return name;
  int n = snprintf(name.text, bytes, "%s (ranks", group_name(group->id).text);
  for (int32_t i = 0; i < group->size && i < 8; i++)
    n += snprintf(name.text + n, bytes - (size_t)n, "%s %d", i ? "," : "", group->members[i]);
  snprintf(name.text + n, bytes - (size_t)n, "%s)", group->size > 8 ? ", ..." : "");
  return name;
}

/* "recv of float32 [3] in group 1 (ranks 0, 2)" */
static void name(const struct operation *operation, bool receives, char *text, size_t bytes) {
  struct layout_name whole = layout_name(receives ? &operation->receives : &operation->sends, 0);
  const char *kind = operation->out.count == 0 ? "recv" : operation->in.count == 0 ? "send" : "sendrecv";
  const char *array = strstr(whole.text, " of ");
  int n = operation_is_collective(operation) ? snprintf(text, bytes, "%s", whole.text)
                                             : snprintf(text, bytes, "%s%s", kind, array ? array : "");
  if ((size_t)n < bytes) snprintf(text + n, bytes - (size_t)n, "%s", name_group(operation->group).text);
}

static mlxdist_wait describe(const struct operation *operation, uint64_t now) {
  struct straggler late = operation_straggler(operation);
  uint64_t since = operation->stuck_since_ns;
  bool stands = since && operation->seen_progress == operation->progress_count && now > since;
  mlxdist_wait wait = {.number = operation->number,
                       .progress_count = operation->progress_count,
                       .stuck_ns = stands ? now - since : 0,
                       .rank = late.needs_entry ? late.rank : -1,
                       .group = operation->group->id,
                       .receives = late.receives,
                       .transfer = late.transfer,
                       .lazy = operation->lazy};
  name(operation, late.receives, wait.name, sizeof wait.name);
  return wait;
}

uint64_t mlxdist_waits(mlxdist_group *group, mlxdist_wait *waits, uint64_t room, mlxdist_waiting_thread *threads) {
  struct engine *engine = group->engine;
  if (!engine_lock_soon(engine)) return UINT64_MAX;
  uint64_t n = 0, now = clock_ns();
  for (const struct operation *operation = engine->active; operation; operation = operation->next, n++)
    if (n < room) waits[n] = describe(operation, now);
  for (int i = 0; i < MLXDIST_THREADS; i++) {
    const struct deadlock_thread *entry = &engine->threads[i];
    threads[i] = (mlxdist_waiting_thread){.thread = entry->thread,
                                          .id = entry->id,
                                          .number = entry->operation ? entry->operation->number : 0,
                                          .timed = entry->timed};
  }
  engine_unlock(engine);
  return n <= room ? n : UINT64_MAX;
}

/* Whether all that this rank has sent there has arrived. */
static bool has_arrived(const struct peer *peer) {
  for (uint32_t i = 0; i < peer->endpoint.channel_count; i++)
    if (peer->endpoint.channels[i].acked != peer->endpoint.channels[i].sent) return false;
  return true;
}

/* The operation in progress that sends this transfer in a round that has not begun. Without one the transfer is on its
 * way: what sends it waits for no operation. */
static uint64_t sends_later(const struct engine *engine, const struct group_peer *group_peer, uint64_t transfer) {
  for (const struct operation *operation = engine->active; operation; operation = operation->next) {
    if (operation->current + 1 >= operation->round_count) continue;
    for (int i = operation->rounds[operation->current + 1].first_out; i < operation->out.count; i++)
      if (operation->out.list[i].group_peer == group_peer && transfer_name(&operation->out.list[i]) == transfer)
        return operation->number;
  }
  return UINT64_MAX;
}

static uint64_t come(const struct engine *engine, const mlxdist_edge *edge) {
  if (edge->rank < 0 || edge->rank >= engine->size || edge->rank == engine->rank) return UINT64_MAX;
  const mlxdist_group *group = engine_group(engine, (uint16_t)edge->group);
  /* An ended group sends nothing more, but its last messages may be lost. It cannot end during a receive. */
  if (!group) return edge->receives && !has_arrived(&engine->peers[edge->rank]) ? UINT64_MAX : 0;
  int32_t member = group->member_of[edge->rank];
  if (member < 0) return UINT64_MAX;
  const struct group_peer *group_peer = &group->peers[member];
  const struct places *places = (edge->transfer & 0xffff) != WIRE_MESSAGE ? &group->collectives
                                : edge->receives                          ? &group_peer->sends
                                                                          : &group_peer->receives;
  if (!places_has_issued(places, (uint32_t)(edge->transfer >> 16))) return 0;
  return edge->receives ? sends_later(engine, group_peer, edge->transfer) : UINT64_MAX;
}

int mlxdist_come(mlxdist_group *world, const mlxdist_edge *edges, uint64_t count, uint64_t *numbers) {
  struct engine *engine = world->engine;
  if (!engine_lock_soon(engine)) return 0;
  for (uint64_t i = 0; i < count; i++) numbers[i] = come(engine, &edges[i]);
  engine_unlock(engine);
  return 1;
}
