/* The world: the group of all ranks, which is created, connected and destroyed with the engine. */
#include "abort.h"
#include "error.h"
#include "group.h"
#include "progress.h"
#include "progress_thread.h"
#include "thread.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What a rank sends to the others, followed by one endpoint_address for every rank. */
struct group_address {
  uint32_t magic;
  int32_t rank, size;
  uint32_t bulk_slot_bytes, bulk_slots, eager_slots, on_demand_threshold, checksum, reliable;
  uint32_t one_host; /* see struct engine */
  struct thread_cores cores;
};

const char *mlxdist_version(void) { return MLXDIST_VERSION; }

void mlxdist_default_options(mlxdist_options *options) {
  /* Slots of 128 KiB stay in the second-level cache between the sender's copy and the receiver's reduction.
   * Six each way and 32 eager ones are 1.75 MiB a peer, 12.25 MiB for a rank of eight. */
  *options = (mlxdist_options){.timeout = 30,
                               .entry_timeout = 1800,
                               .stall_warning = 10,
                               .bulk_slot_bytes = 128 << 10,
                               .bulk_slots = 6,
                               .eager_slots = 32,
                               .links_per_peer = 1,
                               .on_demand_threshold = 8,
                               .meet_after = 2,
                               .keepalive = 60,
                               .algo = MLXDIST_AUTO,
                               .soft_profile = "ideal"};
}

static int check_options(int32_t rank, int32_t size, const mlxdist_options *options) {
  if (size < 1 || size > MLXDIST_MAX_RANKS || rank < 0 || rank >= size)
    return fail(MLXDIST_INVALID_ARGUMENT, "rank %d of %d: the world has 1 to %d ranks, numbered from 0", rank, size,
                MLXDIST_MAX_RANKS);
  if (options->bulk_slot_bytes < 4096 || options->bulk_slot_bytes > 1 << 20 || options->bulk_slot_bytes % 4096)
    return fail(MLXDIST_INVALID_ARGUMENT, "bulk slots of %u bytes: must be a multiple of 4096, at most 1 MiB",
                options->bulk_slot_bytes);
  if (options->bulk_slots < 2 || options->bulk_slots > 64 || options->eager_slots < 4 || options->eager_slots > 256)
    return fail(MLXDIST_INVALID_ARGUMENT, "%u bulk and %u eager slots: must be 2 to 64 and 4 to 256",
                options->bulk_slots, options->eager_slots);
  if (options->links_per_peer < 1 || options->links_per_peer > MLXDIST_MAX_LINKS)
    return fail(MLXDIST_INVALID_ARGUMENT, "%u links per peer: must be 1 to %d", options->links_per_peer,
                MLXDIST_MAX_LINKS);
  if (options->algo < MLXDIST_AUTO || options->algo > MLXDIST_HIERARCHICAL)
    return fail(MLXDIST_INVALID_ARGUMENT, "there is no algorithm %d", options->algo);
  return MLXDIST_OK;
}

static int create_groups(struct engine *engine, mlxdist_group **world) {
  int32_t members[MLXDIST_MAX_RANKS];
  for (int32_t member = 0; member < engine->size; member++) members[member] = member;
  mlxdist_group *lane;
  int status = group_new(engine, 0, members, engine->size, world);
  if (status) return status;
  status = group_new(engine, GROUP_STREAM_LANE, members, engine->size, &lane);
  if (!status) {
    lane->counters = (*world)->counters;
  } else {
    group_free(*world);
    *world = 0;
  }
  return status;
}

int mlxdist_group_create(int32_t rank, int32_t size, const mlxdist_options *options, mlxdist_group **result) {
  mlxdist_options defaults;
  mlxdist_default_options(&defaults);
  if (!options) options = &defaults;
  *result = 0;
  int status = check_options(rank, size, options);
  if (status) return status;
  struct engine *engine;
  status = engine_new(rank, size, options, &progress_callbacks, &engine);
  if (status) return status;
  status = create_groups(engine, result);
  if (status) engine_free(engine);
  return status;
}

void mlxdist_group_destroy(mlxdist_group *group) {
  if (!group) return;
  struct engine *engine = group->engine;
  bool is_world = group->id == 0;
  if (is_world) progress_stop(engine);
  engine_remove_group(engine, group);
  group_free(group);
  if (!is_world) return;
  group_free(engine->stream_lane);
  engine_free(engine);
}

uint64_t mlxdist_group_address_size(mlxdist_group *group) {
  return sizeof(struct group_address) + (uint64_t)group->size * sizeof(struct endpoint_address);
}

int mlxdist_group_address(mlxdist_group *group, void *bytes) {
  struct engine *engine = group->engine;
  struct group_address address = {.magic = WIRE_MAGIC,
                                  .rank = engine->rank,
                                  .size = engine->size,
                                  .bulk_slot_bytes = engine->options.bulk_slot_bytes,
                                  .bulk_slots = engine->options.bulk_slots,
                                  .eager_slots = engine->options.eager_slots,
                                  .on_demand_threshold = engine->options.on_demand_threshold,
                                  .checksum = engine->options.checksum != 0,
                                  .reliable = engine->options.reliable != 0,
                                  .one_host = engine->one_host,
                                  .cores = thread_cores()};
  memcpy(bytes, &address, sizeof address);
  char *at = (char *)bytes + sizeof address;
  for (int32_t rank = 0; rank < engine->size; rank++, at += sizeof(struct endpoint_address)) {
    struct endpoint_address peer;
    endpoint_address(&engine->peers[rank].endpoint, &peer);
    memcpy(at, &peer, sizeof peer);
  }
  return MLXDIST_OK;
}

static int check_address(const struct engine *engine, int32_t rank, const struct group_address *address) {
  if (address->magic != WIRE_MAGIC || address->rank != rank || address->size != engine->size)
    return fail(MLXDIST_MISMATCH,
                "the address of rank %d is not one of mlxdist %s for %d ranks; do all ranks run the "
                "same version?",
                rank, MLXDIST_VERSION, engine->size);
  const mlxdist_options *options = &engine->options;
  if (address->bulk_slot_bytes != options->bulk_slot_bytes || address->bulk_slots != options->bulk_slots ||
      address->eager_slots != options->eager_slots)
    return fail(MLXDIST_MISMATCH,
                "ranks differ in their slots: rank %d has %u bulk slots of %u bytes and %u eager "
                "ones, rank %d has %u of %u and %u; set MLXDIST_BULK_SLOTS, MLXDIST_BULK_SLOT_BYTES and "
                "MLXDIST_EAGER_SLOTS alike on all (slots of 4096 bytes where one of them has macOS 26.2 or 27, "
                "which take no more)",
                engine->rank, options->bulk_slots, options->bulk_slot_bytes, options->eager_slots, rank,
                address->bulk_slots, address->bulk_slot_bytes, address->eager_slots);
  if (address->on_demand_threshold != options->on_demand_threshold)
    return fail(MLXDIST_MISMATCH,
                "ranks differ in how they connect: rank %d connects up to %u ranks at the start, "
                "rank %d up to %u; set MLXDIST_ON_DEMAND_THRESHOLD alike on all",
                engine->rank, options->on_demand_threshold, rank, address->on_demand_threshold);
  if (address->reliable != (options->reliable != 0))
    return fail(MLXDIST_MISMATCH,
                "rank %d and rank %d do not agree on the kind of queue pairs; set MLXDIST_QP_TYPE alike "
                "on all",
                engine->rank, rank);
  if (address->checksum != (engine->options.checksum != 0))
    return fail(MLXDIST_MISMATCH, "rank %d and rank %d do not agree on checksums; set MLXDIST_CHECKSUM alike on all",
                engine->rank, rank);
  return MLXDIST_OK;
}

/* Whether there are more ranks than cores. All ranks find the same, since they choose algorithms by it. */
static bool is_crowded(const struct engine *engine, const char *addresses, uint64_t each) {
  struct thread_cores all = {0};
  int32_t cores = 0;
  for (int32_t rank = 0; rank < engine->size; rank++, addresses += each) {
    struct group_address address;
    memcpy(&address, addresses, sizeof address);
    if (!address.one_host) return false;
    for (int i = 0; i < THREAD_CORES / 64; i++) all.words[i] |= address.cores.words[i];
  }
  for (int i = 0; i < THREAD_CORES / 64; i++) cores += __builtin_popcountll(all.words[i]);
  return engine->size > cores;
}

int mlxdist_group_connect(mlxdist_group *group, const void *addresses, uint64_t bytes) {
  struct engine *engine = group->engine;
  uint64_t each = mlxdist_group_address_size(group);
  if (bytes != each * (uint64_t)engine->size)
    return fail(MLXDIST_INVALID_ARGUMENT, "addresses of %d ranks are %llu bytes, not %llu", engine->size,
                (unsigned long long)each * (unsigned long long)engine->size, (unsigned long long)bytes);
  if (engine->progress_runs) return fail(MLXDIST_INVALID_ARGUMENT, "the group is connected already");
  int status = MLXDIST_OK;
  for (int32_t rank = 0; rank < engine->size && !status; rank++) {
    if (rank == engine->rank) continue;
    const char *at = (const char *)addresses + each * (uint64_t)rank;
    struct group_address address;
    struct endpoint_address reached;
    memcpy(&address, at, sizeof address);
    memcpy(&reached, at + sizeof address + (uint64_t)engine->rank * sizeof reached, sizeof reached);
    struct endpoint *endpoint = &engine->peers[rank].endpoint;
    status = check_address(engine, rank, &address);
    if (status || !endpoint->channel_count) continue;
    status = endpoint_connect(endpoint, &reached);
    endpoint->usable = !status; /* nothing is sent before the barrier that follows */
  }
  engine->crowded = !status && is_crowded(engine, addresses, each);
  backoff_set_crowded(engine->crowded);
  return status || engine->size == 1 ? status : progress_start(engine);
}

const char *mlxdist_group_provider(mlxdist_group *group) {
  return group->engine->size > 1 ? group->engine->transport.provider : "none";
}

void mlxdist_group_abort(mlxdist_group *group, int32_t status, const char *reason) {
  failure_set(&group->engine->failure, status == MLXDIST_OK ? MLXDIST_ABORTED : status, reason);
  progress_wake(group->engine);
}

void mlxdist_group_fail(mlxdist_group *group, int32_t status, const char *reason) {
  engine_lock(group->engine);
  engine_fail_all(group->engine, 0, fail(status == MLXDIST_OK ? MLXDIST_ABORTED : status, "%s", reason));
  engine_unlock(group->engine);
}

int mlxdist_group_error(mlxdist_group *group) { return failure_check(&group->engine->failure); }

int mlxdist_group_watch_failure(mlxdist_group *group) { return failure_watch(&group->engine->failure); }
void mlxdist_group_stop_watching(mlxdist_group *group) { failure_unwatch(&group->engine->failure); }

int mlxdist_group_set_tuning(mlxdist_group *group, const mlxdist_tuning *table, uint64_t lines) {
  struct engine *engine = group->engine;
  mlxdist_tuning *copy = lines ? calloc(lines, sizeof *copy) : 0;
  if (lines && !copy) return fail(MLXDIST_RESOURCES, "out of memory for a tuning table");
  if (lines) memcpy(copy, table, lines * sizeof *copy);
  free(engine->tuning);
  engine->tuning = copy;
  engine->tuning_lines = lines;
  return MLXDIST_OK;
}

/* A link by its number in front: "1:drop=1/1". */
static int inject(const struct device *device, const char *faults) {
  bool one = faults[0] >= '0' && faults[0] <= '9' && faults[1] == ':';
  if (one && (uint32_t)(faults[0] - '0') != device->link) return 0;
  if (!device->verbs->inject) return EOPNOTSUPP;
  return device->verbs->inject(device->context, one ? faults + 2 : faults);
}

int mlxdist_group_inject_faults(mlxdist_group *group, const char *faults) {
  struct engine *engine = group->engine;
  int error = 0;
  engine_lock(engine);
  for (uint32_t i = 0; i < engine->transport.device_count && !error; i++)
    error = inject(&engine->transport.devices[i], faults);
  engine_unlock(engine);
  if (!error) return MLXDIST_OK;
  return fail(MLXDIST_INVALID_ARGUMENT, "provider %s knows no faults \"%s\": %s", engine->transport.provider, faults,
              strerror(error));
}
