#include "peer.h"

#include "engine.h"

#include <errno.h>
#include <string.h>

/* Random first packet numbers, so that nothing of an earlier connection is taken for this one's. */
static uint32_t random_psn(void) {
  static uint64_t state;
  state += clock_ns() * 0x9e3779b97f4a7c15ull + 1; /* splitmix64 (Steele et al. 2014) over the clock */
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (uint32_t)(z >> 40);
}

int peer_create(struct peer *peer, struct engine *engine, int32_t rank) {
  const mlxdist_options *options = &engine->options;
  uint64_t eager = channel_memory_bytes(options->eager_slots, 4096);
  *peer = (struct peer){.rank = rank,
                        .memory_bytes = eager + channel_memory_bytes(options->bulk_slots, options->bulk_slot_bytes),
                        .streams_sent = WIRE_START,
                        .streams_received = WIRE_START,
                        .streams_done = WIRE_START};
  peer->memory = engine->verbs->alloc_memory(engine->context, peer->memory_bytes);
  if (!peer->memory)
    return fail(MLXDIST_RESOURCES, "no memory for the slabs to rank %d: %llu bytes", rank,
                (unsigned long long)peer->memory_bytes);
  peer->mr = engine->verbs->reg_mr(engine->pd, peer->memory, peer->memory_bytes, IBV_ACCESS_LOCAL_WRITE);
  if (!peer->mr) return fail(MLXDIST_RESOURCES, "reg_mr for rank %d failed: %s", rank, strerror(errno));
  count(&engine->counters.memory_registrations, 1);
  count(&engine->counters.slab_bytes, peer->memory_bytes);
  for (uint32_t i = 0; i < WIRE_CHANNELS; i++) {
    peer->psn[i] = random_psn();
    char *memory = peer->memory + (i == WIRE_EAGER ? 0 : eager);
    int status = channel_create(&peer->channels[i], engine, peer, i, memory, peer->mr->lkey);
    if (status) return status;
  }
  return MLXDIST_OK;
}

/* Queue pairs first, then registrations: Apple's provider fails to unmap a region that a queue pair uses. */
void peer_destroy(struct peer *peer, struct engine *engine) {
  for (int i = 0; i < WIRE_CHANNELS; i++)
    if (peer->channels[i].engine) channel_destroy(&peer->channels[i]);
  if (peer->mr) engine->verbs->dereg_mr(peer->mr);
  if (peer->memory) engine->verbs->free_memory(engine->context, peer->memory, peer->memory_bytes);
  *peer = (struct peer){0};
}

void peer_address(const struct peer *peer, struct peer_address *address) {
  for (int i = 0; i < WIRE_CHANNELS; i++) {
    address->qp_num[i] = peer->channels[i].qp->qp_num;
    address->psn[i] = peer->psn[i];
  }
}

int peer_connect(struct peer *peer, struct engine *engine, const union ibv_gid *gid, uint16_t lid,
                 const struct peer_address *address) {
  for (int i = 0; i < WIRE_CHANNELS; i++) {
    struct channel *channel = &peer->channels[i];
    int status = channel_connect(channel, gid, lid, address->qp_num[i], address->psn[i], peer->psn[i],
                                 engine->port.active_mtu);
    if (!status) status = channel_post_all(channel);
    if (status) return status;
  }
  peer->connected = true;
  return MLXDIST_OK;
}

int peer_acknowledge(struct peer *peer, bool lazily) {
  struct channel *eager = &peer->channels[WIRE_EAGER], *bulk = &peer->channels[WIRE_BULK];
  if (!channel_owes_news(eager, lazily) && !channel_owes_news(bulk, lazily)) return MLXDIST_OK;
  if (!channel_can_send(eager, WIRE_ACK)) return MLXDIST_OK; /* a later turn will */
  return channel_send(eager, &(struct outgoing_message){.kind = WIRE_ACK});
}

bool peer_has_everything(const struct peer *peer) {
  for (int i = 0; i < WIRE_CHANNELS; i++)
    if (!wire_at_least(peer->channels[i].acked, peer->channels[i].sent_data)) return false;
  return true;
}
