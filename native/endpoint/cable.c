#include "cable.h"

#include "debug.h"
#include "engine.h"

static uint32_t link_of(const struct channel *channel) { return channel->index / 2; }

/* A cable that works and is not `link`; -1 if there is none. */
static int32_t other_link(const struct peer *peer, uint32_t link) {
  for (uint32_t other = 0; other < peer->channel_count / 2; other++)
    if (other != link && !(peer->dead_links >> other & 1)) return (int32_t)other;
  return -1;
}

int cable_suspect(struct channel *channel) {
  struct peer *peer = channel->peer;
  int32_t other = other_link(peer, link_of(channel));
  if (other < 0 || peer->dead_links >> link_of(channel) & 1) return MLXDIST_OK;
  debug(DEBUG_INFO, "cable", "rank %d does not answer by cable %u; it is asked by cable %d", peer->rank,
        link_of(channel), other);
  peer->suspect = channel;
  bool sent;
  return channel_acknowledge(&peer->channels[2 * other + WIRE_EAGER], peer->ready_group, peer->ready, WIRE_ECHO, &sent);
}

int cable_cut(struct channel *channel) {
  struct peer *peer = channel->peer;
  uint32_t link = link_of(channel);
  peer->channels[2 * link + WIRE_EAGER].open = peer->channels[2 * link + WIRE_BULK].open = false; /* aborts, too */
  if (other_link(peer, link) < 0)
    return fail(MLXDIST_TRANSPORT,
                "the port of device %s, by which rank %d reaches rank %d, is down; is the cable "
                "plugged in at both ends? `mlxdist devices` shows the ports",
                channel->device->name, channel->engine->rank, peer->rank);
  debug(DEBUG_WARN, "cable",
        "cable %u to rank %d is dead: the port of device %s is down; what it carried goes by "
        "the other one",
        link, peer->rank, channel->device->name);
  peer->dead_links |= 1u << link;
  return MLXDIST_OK;
}

void cable_heard(struct channel *channel, const struct wire_header *header) {
  struct peer *peer = channel->peer;
  if (header->kind != WIRE_ACK) return;
  if (header->flags & WIRE_ECHO) peer->echo_links |= 1u << link_of(channel);
  const struct channel *suspect = peer->suspect;
  if (!(header->flags & WIRE_ANSWER) || !suspect || link_of(suspect) == link_of(channel)) return;
  /* The answer says, too, what has come by the suspect cable. */
  bool heard = suspect->acked == suspect->sent || suspect->acked != suspect->seen_acked;
  if (!heard) {
    debug(DEBUG_WARN, "cable", "cable %u to rank %d is dead; what it carried goes by the other one", link_of(suspect),
          peer->rank);
    peer->dead_links |= 1u << link_of(suspect);
  }
  peer->suspect = 0;
}

int cable_answer(struct peer *peer) {
  for (uint32_t link = 0; link < peer->channel_count / 2; link++) {
    if (!(peer->echo_links >> link & 1)) continue;
    bool sent;
    struct channel *channel = &peer->channels[2 * link + WIRE_EAGER];
    int status = channel_acknowledge(channel, peer->ready_group, peer->ready, WIRE_ANSWER, &sent);
    if (status) return status;
    if (sent) peer->echo_links &= ~(1u << link);
  }
  return MLXDIST_OK;
}

static int move_messages(struct channel *dead, struct channel *alive) {
  int status = MLXDIST_OK;
  while (dead->acked != dead->sent && !status && channel_can_send(alive, WIRE_ABORT)) {
    status = channel_forward(dead, channel_oldest_slot(dead), alive);
    dead->acked++;
  }
  return status;
}

int cable_move_messages(struct peer *peer) {
  for (uint32_t link = 0; link < peer->channel_count / 2; link++) {
    int32_t other = other_link(peer, link);
    if (!(peer->dead_links >> link & 1) || other < 0) continue;
    for (uint32_t kind = WIRE_EAGER; kind <= WIRE_BULK; kind++) {
      int status = move_messages(&peer->channels[2 * link + kind], &peer->channels[2 * (uint32_t)other + kind]);
      if (status) return status;
    }
  }
  return MLXDIST_OK;
}
