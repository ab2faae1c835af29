#include "failover.h"

#include "acknowledgement.h"
#include "credit.h"
#include "debug.h"

#include <string.h>

int failover_probe(struct channel *channel) {
  struct endpoint *endpoint = channel->endpoint;
  uint32_t link = channel_link(channel);
  int32_t other = link_other(endpoint, link);
  if (other < 0 || endpoint->dead_links >> link & 1) return MLXDIST_OK;
  debug(DEBUG_INFO, "link", "rank %d does not reply by link %u; it is asked by link %d", endpoint->rank, link, other);
  endpoint->suspect = channel;
  bool sent;
  return acknowledgement_send(&endpoint->channels[2 * other + WIRE_EAGER], WIRE_PROBE, &sent);
}

/* The reply says, too, what has come by the suspect link. */
static void judge(struct endpoint *endpoint) {
  const struct channel *suspect = endpoint->suspect;
  endpoint->suspect = 0;
  if (link_other(endpoint, channel_link(suspect)) < 0) return; /* the other one has died since it brought this */
  if (suspect->acked == suspect->sent || suspect->acked != suspect->seen_acked) return;
  debug(DEBUG_WARN, "link", "link %u to rank %d is dead; what it carried goes by the other one", channel_link(suspect),
        endpoint->rank);
  endpoint_mark_dead(endpoint, channel_link(suspect));
}

void failover_on_ack(struct channel *channel, const struct wire_header *header) {
  struct endpoint *endpoint = channel->endpoint;
  uint32_t link = channel_link(channel);
  if (header->flags & WIRE_PROBE) {
    endpoint->probe_links |= 1u << link;
    endpoint_mark_ack(endpoint);
  }
  if (header->flags & WIRE_PROBE_REPLY && endpoint->suspect && channel_link(endpoint->suspect) != link) judge(endpoint);
}

int failover_reply(struct endpoint *endpoint) {
  int status = MLXDIST_OK;
  for (uint32_t link = 0; link < endpoint->channel_count / 2 && !status; link++) {
    if (!(endpoint->probe_links >> link & 1)) continue;
    bool sent;
    status = acknowledgement_send(&endpoint->channels[2 * link + WIRE_EAGER], WIRE_PROBE_REPLY, &sent);
    if (sent) endpoint->probe_links &= ~(1u << link);
  }
  return status;
}

/* Sends the message in a slot of a dead channel by another one, marked. */
static int forward(const struct channel *dead, uint32_t slot, struct channel *alive) {
  const struct kept_message *from = &dead->kept[slot];
  char *bytes = channel_send_slot(alive, alive->send_slot);
  struct wire_header *header = (struct wire_header *)bytes;
  memcpy(bytes, channel_send_slot(dead, slot), from->length);
  if (from->user) memcpy(bytes + from->length, from->user, from->user_length);
  header->sequence = alive->sent + 1;
  header->flags |= WIRE_FAILOVER;
  (void)piggyback_acks(alive->endpoint, header); /* it has room for all links already */
  int status = channel_send_written(alive, from->length + from->user_length);
  if (status) return status;
  count(&alive->transport->counters->retransmissions, 1);
  return MLXDIST_OK;
}

static int forward_all(struct channel *dead, struct channel *alive) {
  int status = MLXDIST_OK;
  while (dead->acked != dead->sent && !status && channel_can_send(alive, WIRE_ABORT)) {
    status = forward(dead, channel_oldest_slot(dead), alive);
    channel_forget_oldest(dead);
  }
  return status;
}

int failover_resend(struct endpoint *endpoint) {
  int status = MLXDIST_OK;
  for (uint32_t link = 0; link < endpoint->channel_count / 2; link++) {
    int32_t other = link_other(endpoint, link);
    if (!(endpoint->dead_links >> link & 1) || other < 0) continue;
    for (uint32_t kind = WIRE_EAGER; kind <= WIRE_BULK && !status; kind++)
      status = forward_all(&endpoint->channels[2 * link + kind], &endpoint->channels[2 * (uint32_t)other + kind]);
  }
  return status;
}
