#include "failover.h"

#include "acknowledgement.h"
#include "credit.h"
#include "debug.h"
#include "retransmission.h"

#include <string.h>

int failover_probe(struct channel *channel) {
  struct endpoint *endpoint = channel->endpoint;
  uint32_t link = channel_link(channel);
  if (link_other(endpoint, link) < 0 || link_is_dead(endpoint, link)) return MLXDIST_OK;
  debug(DEBUG_INFO, "link", "rank %d does not reply by link %u; it is asked by the others", endpoint->rank, link);
  endpoint->suspects |= 1u << channel->index;
  int status = MLXDIST_OK;
  for (uint32_t other = 0; other < endpoint->channel_count / 2 && !status; other++) {
    bool sent;
    if (other == link || link_is_dead(endpoint, other)) continue;
    status = acknowledgement_send(&endpoint->channels[2 * other + WIRE_EAGER], WIRE_PROBE, &sent);
  }
  return status;
}

/* The reply says, too, what has come by the suspect link. */
static void judge(struct endpoint *endpoint, const struct channel *suspect) {
  uint32_t link = channel_link(suspect);
  endpoint->suspects &= ~(1u << suspect->index);
  if (link_other(endpoint, link) < 0) return; /* the other one has died since it brought this */
  if (suspect->acked == suspect->sent || suspect->acked != suspect->seen_acked) return;
  if (link_is_dead(endpoint, link)) return;
  link_drop(endpoint, link, "nothing that leaves by it arrives");
}

static void judge_others(struct endpoint *endpoint, uint32_t link) {
  for (uint32_t i = 0; i < endpoint->channel_count; i++)
    if (endpoint->suspects >> i & 1 && i / 2 != link) judge(endpoint, &endpoint->channels[i]);
}

/* The queue pairs of a dead link carry again: what the peer lacks there is skipped where it has left by another link,
 * and retransmitted where it has not. */
static int revive(struct endpoint *endpoint, uint32_t link, const struct wire_header *header) {
  struct channel *channels = &endpoint->channels[2 * (size_t)link];
  endpoint->trials[link].replies = 0;
  if (!(header->flags & WIRE_LINKS)) return MLXDIST_OK; /* it says nothing of this link */
  for (uint32_t kind = WIRE_EAGER; kind <= WIRE_BULK; kind++)
    if (!channel_can_skip_after(&channels[kind], wire_acks(header, link)->ack[kind])) return MLXDIST_OK;
  debug(DEBUG_WARN, "link", "link %u to rank %d works again", link, endpoint->rank);
  endpoint_mark_alive(endpoint, link);
  int status = MLXDIST_OK;
  for (uint32_t kind = WIRE_EAGER; kind <= WIRE_BULK && !status; kind++) {
    channel_skip_after(&channels[kind], wire_acks(header, link)->ack[kind]);
    status = channel_retransmit(&channels[kind]);
  }
  return status;
}

int failover_on_ack(struct channel *channel, const struct wire_header *header) {
  struct endpoint *endpoint = channel->endpoint;
  uint32_t link = channel_link(channel);
  if (header->flags & WIRE_PROBE) {
    endpoint->probe_links |= 1u << link;
    endpoint_mark_ack(endpoint);
    if (!(endpoint->repeating >> channel->index & 1)) endpoint->acks_by_all = true; /* else the link is tried */
  }
  if (!(header->flags & WIRE_PROBE_REPLY)) return MLXDIST_OK;
  judge_others(endpoint, link);
  if (!link_is_dead(endpoint, link)) return MLXDIST_OK;
  endpoint->trials[link].pending = false;
  return ++endpoint->trials[link].replies < FAILOVER_TRIALS ? MLXDIST_OK : revive(endpoint, link, header);
}

void failover_on_dead_links(struct endpoint *endpoint, uint32_t links) {
  uint32_t known = endpoint->peer_dead_links;
  links &= (1u << endpoint->channel_count / 2) - 1; /* it comes from another process */
  endpoint->peer_dead_links = links;
  for (uint32_t left = links; left; left &= left - 1) {
    uint32_t link = (uint32_t)__builtin_ctz(left);
    endpoint->repeating |= 3u << 2 * link;
    if (known >> link & 1 || link_is_dead(endpoint, link) || link_other(endpoint, link) < 0) continue;
    link_drop(endpoint, link, "that rank has found it dead");
  }
}

void failover_on_skip(const struct channel *channel) { channel->endpoint->repeating &= ~(1u << channel->index); }

static int try_link(struct endpoint *endpoint, uint32_t link) {
  struct channel *channels = &endpoint->channels[2 * (size_t)link];
  struct link_trial *trial = &endpoint->trials[link];
  if (trial->pending) trial->replies = 0;
  if (!device_is_up(channels->device)) return MLXDIST_OK; /* Apple's library crashes in a post on a port that is down */
  (void)channel_try_open(&channels[WIRE_EAGER]);
  (void)channel_try_open(&channels[WIRE_BULK]);
  return acknowledgement_send(&channels[WIRE_EAGER], WIRE_PROBE, &trial->pending);
}

int failover_tick(struct endpoint *endpoint, uint64_t now) {
  if (now - endpoint->tried_ns < FAILOVER_TRIAL_NS || endpoint->transport->keepalive_stopped) return MLXDIST_OK;
  endpoint->tried_ns = now;
  int status = MLXDIST_OK;
  for (uint32_t link = 0; link < endpoint->channel_count / 2 && !status; link++)
    if (link_is_dead(endpoint, link)) status = try_link(endpoint, link);
  return status;
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
    uint32_t slot = channel_oldest_slot(dead);
    bool is_empty = ((struct wire_header *)channel_send_slot(dead, slot))->kind == WIRE_SKIP;
    if (!is_empty) status = forward(dead, slot, alive);
    channel_forget_oldest(dead);
  }
  return status;
}

int failover_resend(struct endpoint *endpoint) {
  int status = MLXDIST_OK;
  for (uint32_t link = 0; link < endpoint->channel_count / 2; link++) {
    int32_t other = link_other(endpoint, link);
    if (!link_is_dead(endpoint, link) || other < 0) continue;
    for (uint32_t kind = WIRE_EAGER; kind <= WIRE_BULK && !status; kind++)
      status = forward_all(&endpoint->channels[2 * link + kind], &endpoint->channels[2 * (uint32_t)other + kind]);
  }
  return status;
}
