#include "flight_recorder.h"

#include "layout.h"
#include "operation.h"
#include "straggler.h"

#include <stdlib.h>
#include <string.h>

static inline int32_t rank_of(const struct operation *operation, const struct transfers *transfers) {
  return operation_is_collective(operation) || !transfers->count ? -1
                                                                 : transfers->list[0].group_peer->peer->endpoint.rank;
}

static inline void write_down(struct flight_record *record, const struct operation *operation) {
  record->number = operation->number;
  record->sequence = operation->sequence;
  record->started_ns = operation->started_ns;
  record->descriptor = operation->sends;
  record->to = rank_of(operation, &operation->out);
  record->from = rank_of(operation, &operation->in);
  record->group = operation->group->id;
  memcpy(record->call_site, operation->call_site, sizeof record->call_site);
}

void flight_recorder_add(struct flight_recorder *recorder, const struct operation *operation, int status,
                         uint64_t now_ns) {
  struct flight_record *record = &recorder->records[recorder->next];
  if (++recorder->next == FLIGHT_ENTRIES) recorder->next = 0;
  if (recorder->count < FLIGHT_ENTRIES) recorder->count++;
  write_down(record, operation);
  record->ended_ns = now_ns;
  record->status = status;
  record->waits_for = status ? operation_straggler(operation).rank : -1;
}

/* With the lock. Returns how many there are. */
static uint64_t copy_all(const struct engine *engine, struct flight_record *records) {
  const struct flight_recorder *recorder = &engine->flight_recorder;
  uint64_t n = recorder->count;
  memcpy(records, recorder->records, n * sizeof *records);
  for (const struct operation *operation = engine->active; operation; operation = operation->next) {
    struct flight_record *record = &records[n++];
    write_down(record, operation);
    record->ended_ns = 0;
    record->status = MLXDIST_OK;
    record->waits_for = operation_straggler(operation).rank;
  }
  return n;
}

static int by_number(const void *a, const void *b) {
  const struct flight_record *first = a, *second = b;
  return (first->number > second->number) - (first->number < second->number);
}

static mlxdist_flight_record describe(const struct flight_record *record) {
  const struct wire_descriptor *descriptor = &record->descriptor;
  mlxdist_flight_record entry = {.number = record->number,
                                 .sequence = record->sequence,
                                 .started_ns = record->started_ns,
                                 .ended_ns = record->ended_ns,
                                 .group = (int32_t)(record->group & ~GROUP_INTERNAL),
                                 .internal = (record->group & GROUP_INTERNAL) != 0,
                                 .collective = descriptor->operation != WIRE_SEND,
                                 .status = record->status,
                                 .waits_for = record->waits_for,
                                 .to = record->to,
                                 .from = record->from,
                                 .root = descriptor->root,
                                 .algorithm = descriptor->algorithm,
                                 .layout = {.dtype = descriptor->dtype, .ndim = descriptor->ndim}};
  memcpy(entry.layout.shape, descriptor->shape, sizeof entry.layout.shape);
  const char *name = layout_operation(descriptor);
  if (!entry.collective) name = layout_message(record->to >= 0, record->from >= 0);
  strncpy(entry.operation, name, sizeof entry.operation - 1);
  if (layout_has_array(descriptor))
    entry.bytes = layout_bytes(&entry.layout);
  else
    entry.layout.ndim = -1;
  memcpy(entry.call_site, record->call_site, sizeof entry.call_site - 1);
  return entry;
}

uint64_t mlxdist_flight_read(mlxdist_group *group, mlxdist_flight_record *entries, uint64_t room) {
  struct engine *engine = group->engine;
  if (!engine_lock_soon(engine)) return 0;
  uint64_t most = engine->flight_recorder.count + (uint64_t)engine->active_count;
  struct flight_record *records = malloc((most + 1) * sizeof *records);
  uint64_t n = records ? copy_all(engine, records) : 0;
  engine_unlock(engine);
  if (n) qsort(records, n, sizeof *records, by_number);
  uint64_t skipped = n > room ? n - room : 0;
  for (uint64_t i = skipped; i < n; i++) entries[i - skipped] = describe(&records[i]);
  free(records);
  return n - skipped;
}

uint64_t mlxdist_flight_members(mlxdist_group *group, int32_t id, int32_t *members, uint64_t room) {
  struct engine *engine = group->engine;
  if (id < 0 || id > (int32_t)GROUP_STREAM_LANE || !engine_lock_soon(engine)) return 0;
  const mlxdist_group *found = engine_group(engine, (uint16_t)id);
  uint64_t size = found ? (uint64_t)found->size : 0;
  for (uint64_t i = 0; i < size && i < room; i++) members[i] = found->members[i];
  engine_unlock(engine);
  return size;
}
