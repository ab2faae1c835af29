#include "peer.h"

#include "cable.h"
#include "debug.h"
#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

uint32_t peer_random_psn(void) {
  static _Atomic uint64_t state; /* of all engines of the process */
  uint64_t step = clock_ns() * 0x9e3779b97f4a7c15ull + 1; /* splitmix64 (Steele et al. 2014) over the clock */
  uint64_t z = atomic_fetch_add_explicit(&state, step, memory_order_relaxed) + step;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (uint32_t)(z >> 40);
}

static int create_slab(struct peer *peer, struct engine *engine, uint32_t link) {
  struct slab *slab = &peer->slabs[link];
  struct device *device = &engine->devices[link];
  uint64_t eager = channel_memory_bytes(engine, WIRE_EAGER);
  slab->bytes = eager + channel_memory_bytes(engine, WIRE_BULK);
  slab->memory = device->verbs->alloc_memory(device->context, slab->bytes);
  if (!slab->memory)
    return fail(MLXDIST_RESOURCES, "no memory for the slabs to rank %d: %llu bytes", peer->rank,
                (unsigned long long)slab->bytes);
  slab->mr = device->verbs->reg_mr(device->pd, slab->memory, slab->bytes, IBV_ACCESS_LOCAL_WRITE);
  if (!slab->mr) return fail(MLXDIST_RESOURCES, "reg_mr for rank %d failed: %s", peer->rank, strerror(errno));
  count(&engine->counters.memory_registrations, 1);
  count(&engine->counters.slab_bytes, slab->bytes);
  int status = MLXDIST_OK;
  for (uint32_t index = 2 * link; index < 2 * link + 2 && !status; index++) {
    peer->psn[index] = peer_random_psn();
    char *memory = slab->memory + (index % 2 == WIRE_EAGER ? 0 : eager);
    status = channel_create(&peer->channels[index], engine, peer, device, index, memory, slab->mr->lkey);
  }
  return status;
}

int peer_create(struct peer *peer, struct engine *engine) {
  int status = MLXDIST_OK;
  for (uint32_t link = 0; link < engine->links && !status; link++) status = create_slab(peer, engine, link);
  if (!status) peer->channel_count = 2 * engine->links;
  return status;
}

static void release_early(struct peer *peer) {
  while (peer->early) {
    struct arrival *arrival = peer->early;
    peer->early = arrival->next;
    if (arrival->on_heap) free(arrival);
  }
}

/* Queue pairs first, then registrations: Apple's provider fails to unmap a region that a queue pair uses. */
void peer_destroy(struct peer *peer) {
  release_early(peer);
  for (uint32_t i = 0; i < WIRE_CHANNELS; i++) {
    struct channel *channel = &peer->channels[i];
    struct device *device = channel->device;
    if (!device) continue;
    channel_destroy(channel);
    if (i % 2 == 0) continue;
    struct slab *slab = &peer->slabs[i / 2];
    if (slab->mr) device->verbs->dereg_mr(slab->mr);
    if (slab->memory) device->verbs->free_memory(device->context, slab->memory, slab->bytes);
  }
}

void peer_address(const struct peer *peer, struct peer_address *address) {
  *address = (struct peer_address){0};
  for (uint32_t i = 0; i < peer->channel_count; i++) {
    address->qp_num[i] = peer->channels[i].qp->qp_num;
    address->psn[i] = peer->psn[i];
  }
}

int peer_connect(struct peer *peer, const union ibv_gid *gids, const uint16_t *lids,
                 const struct peer_address *address) {
  for (uint32_t i = 0; i < peer->channel_count; i++) {
    struct channel *channel = &peer->channels[i];
    int status = channel_connect(channel, &gids[i / 2], lids[i / 2], address->qp_num[i], address->psn[i], peer->psn[i]);
    if (!status) status = channel_post_all(channel);
    if (status) return status;
    channel->answered = channel->open = true; /* nobody sends before the peer is usable */
  }
  debug(DEBUG_INFO, "connection", "connected to rank %d by %u queue pairs", peer->rank, peer->channel_count);
  peer->connected = true;
  return MLXDIST_OK;
}

int peer_acknowledge(struct peer *peer, bool lazily) {
  if (peer->echo_links) {
    int status = cable_answer(peer);
    if (status) return status;
  }
  bool owes = peer->tells_ready, sent;
  for (uint32_t i = 0; i < peer->channel_count && !owes; i++) owes = channel_owes_news(&peer->channels[i], lazily);
  if (!owes) return MLXDIST_OK;
  int status = channel_acknowledge(peer_eager(peer), peer->ready_group, peer->ready, 0, &sent);
  if (sent) peer->tells_ready = false;
  return status;
}

int peer_tell_ready(struct peer *peer, uint16_t group, uint32_t stream) {
  bool other = peer->tells_ready && peer->ready_group != group;
  int status = other ? peer_acknowledge(peer, false) : MLXDIST_OK;
  peer->tells_ready = true;
  peer->ready_group = group;
  peer->ready = stream;
  return status;
}

bool peer_is_settled(const struct peer *peer) {
  for (uint32_t i = 0; i < peer->channel_count; i++) {
    const struct channel *channel = &peer->channels[i];
    if (channel->acked != channel->sent || channel->received != channel->told_ack) return false;
  }
  return true;
}
