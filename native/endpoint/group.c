#include "group.h"

#include "layout.h"

#include <stdlib.h>
#include <string.h>

/* What a rank tells the others, followed by one peer_address for every rank. */
struct group_address {
  uint32_t magic;
  int32_t rank, size;
  uint32_t lid;
  union ibv_gid gid;
  uint32_t bulk_slot_bytes, bulk_slots, eager_slots;
  uint32_t reserved;
};

const char *mlxdist_version(void) { return MLXDIST_VERSION; }

void mlxdist_default_options(mlxdist_options *options) {
  /* Slots of 128 KiB stay in the second-level cache between the sender's copy and the receiver's reduction.
   * Six each way and 32 eager ones are 1.75 MiB a peer, 12.25 MiB for a rank of eight. */
  *options = (mlxdist_options){.timeout = 1800, .bulk_slot_bytes = 128 << 10, .bulk_slots = 6, .eager_slots = 32};
}

static int check_options(int32_t rank, int32_t size, const mlxdist_options *options) {
  if (size < 1 || size > GROUP_MAX_RANKS || rank < 0 || rank >= size)
    return fail(MLXDIST_INVALID_ARGUMENT, "rank %d of %d: the world has 1 to %d ranks, numbered from 0", rank, size,
                GROUP_MAX_RANKS);
  if (options->bulk_slot_bytes < 8192 || options->bulk_slot_bytes > 1 << 20 || options->bulk_slot_bytes % 4096)
    return fail(MLXDIST_INVALID_ARGUMENT, "bulk slots of %u bytes: must be a multiple of 4096 from 8192 to 1 MiB",
                options->bulk_slot_bytes);
  if (options->bulk_slots < 2 || options->bulk_slots > 64 || options->eager_slots < 4 || options->eager_slots > 256)
    return fail(MLXDIST_INVALID_ARGUMENT, "%u bulk and %u eager slots: must be 2 to 64 and 4 to 256",
                options->bulk_slots, options->eager_slots);
  return MLXDIST_OK;
}

int mlxdist_group_create(int32_t rank, int32_t size, const mlxdist_options *options, mlxdist_group **result) {
  mlxdist_options defaults;
  mlxdist_default_options(&defaults);
  if (!options) options = &defaults;
  *result = 0;
  int status = check_options(rank, size, options);
  if (status) return status;
  mlxdist_group *group = calloc(1, sizeof *group);
  if (!group) return fail(MLXDIST_RESOURCES, "out of memory for a group");
  struct engine *engine = &group->engine;
  pthread_mutex_init(&engine->lock, 0);
  failure_init(&engine->failure);
  engine->rank = rank;
  engine->size = size;
  engine->options = *options;
  engine->peers = calloc((size_t)size, sizeof *engine->peers);
  if (!engine->peers) status = fail(MLXDIST_RESOURCES, "out of memory for %d peers", size);
  if (!status && size > 1) status = engine_open(engine);
  if (status) {
    mlxdist_group_destroy(group);
    return status;
  }
  *result = group;
  return MLXDIST_OK;
}

uint64_t mlxdist_group_address_size(mlxdist_group *group) {
  return sizeof(struct group_address) + (uint64_t)group->engine.size * sizeof(struct peer_address);
}

int mlxdist_group_address(mlxdist_group *group, void *bytes) {
  struct engine *engine = &group->engine;
  struct group_address address = {.magic = WIRE_MAGIC,
                                  .rank = engine->rank,
                                  .size = engine->size,
                                  .lid = engine->port.lid,
                                  .gid = engine->gid,
                                  .bulk_slot_bytes = engine->options.bulk_slot_bytes,
                                  .bulk_slots = engine->options.bulk_slots,
                                  .eager_slots = engine->options.eager_slots};
  memcpy(bytes, &address, sizeof address);
  char *at = (char *)bytes + sizeof address;
  for (int32_t rank = 0; rank < engine->size; rank++, at += sizeof(struct peer_address)) {
    struct peer_address peer = {0};
    if (rank != engine->rank) peer_address(&engine->peers[rank], &peer);
    memcpy(at, &peer, sizeof peer);
  }
  return MLXDIST_OK;
}

static int check_address(const struct engine *engine, int32_t rank, const struct group_address *address) {
  if (address->magic != WIRE_MAGIC || address->rank != rank || address->size != engine->size)
    return fail(MLXDIST_MISMATCH, "the address of rank %d is not one of mlxdist %s for %d ranks; do all ranks run the "
                "same version?", rank, MLXDIST_VERSION, engine->size);
  const mlxdist_options *options = &engine->options;
  if (address->bulk_slot_bytes != options->bulk_slot_bytes || address->bulk_slots != options->bulk_slots ||
      address->eager_slots != options->eager_slots)
    return fail(MLXDIST_MISMATCH, "ranks differ in their slots: rank %d has %u bulk slots of %u bytes and %u eager "
                "ones, rank %d has %u of %u and %u; set MLXDIST_BULK_SLOTS, MLXDIST_BULK_SLOT_BYTES and "
                "MLXDIST_EAGER_SLOTS alike on all", engine->rank, options->bulk_slots, options->bulk_slot_bytes, options->eager_slots, rank,
                address->bulk_slots, address->bulk_slot_bytes, address->eager_slots);
  return MLXDIST_OK;
}

int mlxdist_group_connect(mlxdist_group *group, const void *addresses, uint64_t bytes) {
  struct engine *engine = &group->engine;
  uint64_t each = mlxdist_group_address_size(group);
  if (bytes != each * (uint64_t)engine->size)
    return fail(MLXDIST_INVALID_ARGUMENT, "addresses of %d ranks are %llu bytes, not %llu", engine->size,
                (unsigned long long)(each * (uint64_t)engine->size), (unsigned long long)bytes);
  if (group->connected) return fail(MLXDIST_INVALID_ARGUMENT, "the group is connected already");
  int status = MLXDIST_OK;
  for (int32_t rank = 0; rank < engine->size && !status; rank++) {
    if (rank == engine->rank) continue;
    const char *at = (const char *)addresses + each * (uint64_t)rank;
    struct group_address address;
    struct peer_address peer;
    memcpy(&address, at, sizeof address);
    memcpy(&peer, at + sizeof address + (uint64_t)engine->rank * sizeof peer, sizeof peer);
    status = check_address(engine, rank, &address);
    if (!status) status = peer_connect(&engine->peers[rank], engine, &address.gid, (uint16_t)address.lid, &peer);
  }
  group->connected = !status;
  return status;
}

const char *mlxdist_group_provider(mlxdist_group *group) {
  return group->engine.verbs ? group->engine.verbs->name : "none";
}

const char *mlxdist_group_provider_reason(mlxdist_group *group) {
  return group->engine.verbs ? group->engine.verbs->reason : "a group of one";
}

int32_t mlxdist_group_rank(mlxdist_group *group) { return group->engine.rank; }
int32_t mlxdist_group_size(mlxdist_group *group) { return group->engine.size; }

void mlxdist_group_abort(mlxdist_group *group, int32_t status, const char *reason) {
  failure_set(&group->engine.failure, status == MLXDIST_OK ? MLXDIST_ABORTED : status, reason);
}

int mlxdist_group_error(mlxdist_group *group) { return failure_check(&group->engine.failure); }

void mlxdist_group_stats(mlxdist_group *group, mlxdist_stats *stats) {
  struct engine *engine = &group->engine;
  struct counters *c = &engine->counters;
  struct verbs_counters provider = {0};
  if (engine->context) engine->verbs->read_counters(engine->context, &provider);
  *stats = (mlxdist_stats){
      .collectives = counted(&c->collectives),
      .point_to_point = counted(&c->point_to_point),
      .payload_bytes_sent = counted(&c->payload_bytes_sent),
      .header_bytes_sent = counted(&c->header_bytes_sent),
      .payload_bytes_received = counted(&c->payload_bytes_received),
      .messages_sent = counted(&c->messages_sent),
      .messages_received = counted(&c->messages_received),
      .control_messages_sent = counted(&c->control_messages_sent),
      .bytes_copied = counted(&c->bytes_copied),
      .post_send_calls = counted(&c->post_send_calls),
      .post_recv_calls = counted(&c->post_recv_calls),
      .poll_cq_calls = counted(&c->poll_cq_calls),
      .receives_posted = counted(&c->receives_posted),
      .memory_registrations = counted(&c->memory_registrations),
      .slab_bytes = counted(&c->slab_bytes),
      .wait_ns = counted(&c->wait_ns),
      .operation_ns = counted(&c->operation_ns),
      .provider_sends = provider.sends,
      .provider_receives = provider.receives,
      .provider_polls = provider.polls,
      .provider_bytes_sent = provider.bytes_sent,
      .provider_dropped = provider.dropped,
  };
}

void mlxdist_group_destroy(mlxdist_group *group) {
  if (!group) return;
  if (group->engine.peers) engine_close(&group->engine);
  free(group->engine.peers);
  failure_destroy(&group->engine.failure);
  pthread_mutex_destroy(&group->engine.lock);
  free(group);
}

int operation_begin(mlxdist_group *group, const char *name, const mlxdist_layout *layout, uint64_t *started) {
  int status = layout_check(name, layout);
  if (status) return status;
  pthread_mutex_lock(&group->engine.lock);
  status = failure_check(&group->engine.failure);
  if (!status && (group->finalized || !group->connected))
    status = fail(MLXDIST_INVALID_ARGUMENT, "%s on a group that is %s", name,
                  group->finalized ? "finalized" : "not connected yet");
  if (status) pthread_mutex_unlock(&group->engine.lock);
  *started = clock_ns();
  return status;
}

int operation_end(mlxdist_group *group, int status, uint64_t started, counter *kind) {
  struct engine *engine = &group->engine;
  if (status) status = engine_fail(engine, status);
  count(kind, 1);
  count(&engine->counters.operation_ns, clock_ns() - started);
  pthread_mutex_unlock(&engine->lock);
  return status;
}

struct peer *group_peer(mlxdist_group *group, const char *name, int32_t rank) {
  if (rank >= 0 && rank < group->engine.size && rank != group->engine.rank) return &group->engine.peers[rank];
  if (rank == group->engine.rank) {
    fail(MLXDIST_INVALID_ARGUMENT, "%s between rank %d and itself: copy the array instead", name, rank);
  } else {
    fail(MLXDIST_INVALID_ARGUMENT, "%s with rank %d: the group has ranks 0 to %d", name, rank, group->engine.size - 1);
  }
  return 0;
}
