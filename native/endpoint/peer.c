#include "peer.h"

#include "cable.h"
#include "debug.h"
#include "engine.h"
#include "explain.h"
#include "queue_pair.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint32_t peer_random_psn(void) {
  static _Atomic uint64_t state;                          /* of all engines of the process */
  uint64_t step = clock_ns() * 0x9e3779b97f4a7c15ull + 1; /* splitmix64 (Steele et al. 2014) over the clock */
  uint64_t z = atomic_fetch_add_explicit(&state, step, memory_order_relaxed) + step;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (uint32_t)(z >> 40);
}

static int register_slab(struct engine *engine, struct link *link) {
  link->slab.mr = device_register(link->device, link->slab.memory, link->slab.bytes);
  if (!link->slab.mr) return MLXDIST_RESOURCES;
  count(&engine->counters.memory_registrations, 1);
  count(&engine->counters.slab_bytes, link->slab.bytes);
  return MLXDIST_OK;
}

static int create_channels(struct peer *peer, struct engine *engine, uint32_t index) {
  struct link *link = &peer->links[index];
  struct device *device = link->device;
  uint64_t eager = channel_memory_bytes(engine, WIRE_EAGER);
  link->mtu = device->port.active_mtu;
  link->slab.bytes = eager + channel_memory_bytes(engine, WIRE_BULK);
  link->slab.memory = device->verbs->alloc_memory(device->context, link->slab.bytes);
  if (!link->slab.memory)
    return fail(MLXDIST_RESOURCES, "no memory for the slabs to rank %d: %llu bytes", peer->rank,
                (unsigned long long)link->slab.bytes);
  int status = MLXDIST_OK;
  for (uint32_t i = 2 * index; i < 2 * index + 2 && !status; i++) {
    peer->psn[i] = peer_random_psn();
    char *memory = link->slab.memory + (i % 2 == WIRE_EAGER ? 0 : eager);
    status = channel_create(&peer->channels[i], engine, peer, link, i, memory);
  }
  if (!status) status = register_slab(engine, link);
  for (uint32_t i = 2 * index; i < 2 * index + 2 && !status; i++) peer->channels[i].lkey = link->slab.mr->lkey;
  return status;
}

int peer_create(struct peer *peer, struct engine *engine) {
  int status = MLXDIST_OK;
  for (uint32_t link = 0; link < peer->link_count && !status; link++) status = create_channels(peer, engine, link);
  if (!status) peer->channel_count = 2 * peer->link_count;
  return status;
}

static void release_early(struct peer *peer) {
  while (peer->early) {
    struct arrival *arrival = peer->early;
    peer->early = arrival->next;
    if (arrival->on_heap) free(arrival);
  }
}

void peer_destroy_channels(struct peer *peer) {
  release_early(peer);
  for (uint32_t i = 0; i < WIRE_CHANNELS; i++) channel_destroy(&peer->channels[i]);
}

void peer_free_memory(struct peer *peer) {
  for (uint32_t i = 0; i < peer->link_count; i++) {
    struct link *link = &peer->links[i];
    if (link->slab.mr) device_deregister(link->device, link->slab.mr);
    if (link->slab.memory) link->device->verbs->free_memory(link->device->context, link->slab.memory, link->slab.bytes);
  }
}

void peer_address(const struct peer *peer, struct peer_address *address) {
  *address = (struct peer_address){.links = peer->link_count};
  for (uint32_t i = 0; i < peer->link_count; i++) {
    address->gids[i] = peer->links[i].gid;
    address->lids[i] = peer->links[i].device->port.lid;
    address->mtus[i] = (uint8_t)peer->links[i].device->port.active_mtu;
  }
  for (uint32_t i = 0; i < peer->channel_count; i++) {
    address->qp_num[i] = peer->channels[i].qp->qp_num;
    address->psn[i] = peer->psn[i];
  }
}

int peer_connect(struct peer *peer, const struct peer_address *address) {
  if (address->links != peer->link_count)
    return fail(MLXDIST_MISMATCH,
                "ranks %d and %d do not agree on the cables between them: one has %u, the other %u; "
                "set MLXDIST_LINKS_PER_PEER and MLXDIST_DEVICE_MAP alike on all",
                peer->channels[0].engine->rank, peer->rank, peer->link_count, address->links);
  for (uint32_t i = 0; i < peer->link_count; i++)
    if (address->mtus[i] && address->mtus[i] < peer->links[i].mtu) peer->links[i].mtu = address->mtus[i];
  for (uint32_t i = 0; i < peer->channel_count; i++) {
    struct channel *channel = &peer->channels[i];
    int status = queue_pair_connect(channel, &address->gids[i / 2], address->lids[i / 2], address->qp_num[i],
                                    address->psn[i], peer->psn[i]);
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
  bool owes = peer->tells_ready || meeting_owes_answer(peer), sent;
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

void peer_explain_silence(const struct peer *peer, char *text, size_t bytes) {
  *text = '\0';
  for (uint32_t i = 0; i < peer->channel_count && !*text; i++) {
    const struct channel *channel = &peer->channels[i];
    const struct verbs *verbs = channel->device->verbs;
    int error = channel->qp && verbs->connect_error ? verbs->connect_error(channel->qp) : 0;
    char why[VERBS_EXPLANATION_BYTES];
    if (!error) continue;
    verbs_explain("connect", error, why, sizeof why);
    snprintf(text, bytes, "connecting to rank %d by TCP fails: %s", peer->rank, why);
  }
}

bool peer_is_settled(const struct peer *peer) {
  for (uint32_t i = 0; i < peer->channel_count; i++) {
    const struct channel *channel = &peer->channels[i];
    if (channel->acked != channel->sent || channel->received != channel->told_ack) return false;
  }
  return true;
}
