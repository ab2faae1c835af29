#include "reconnect.h"

#include "credit.h"
#include "debug.h"
#include "error.h"
#include "queue_pair.h"
#include "receive.h"
#include "retransmission.h"
#include "steady_clock.h"
#include "wc_status.h"

#include <stdio.h>
#include <string.h>

#define RECONNECT_MAGIC 0x5244584du /* "MXDR" */

enum reconnect_step { RECONNECT_REQ = 1, RECONNECT_REP = 2 };

uint32_t reconnect_random_psn(void) {
  static _Atomic uint64_t state;                          /* of all engines of the process */
  uint64_t step = clock_ns() * 0x9e3779b97f4a7c15ull + 1; /* splitmix64 (Steele et al. 2014) over the clock */
  uint64_t z = atomic_fetch_add_explicit(&state, step, memory_order_relaxed) + step;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (uint32_t)(z >> 40);
}

static struct reconnect_message message_of(const struct channel *channel, enum reconnect_step step) {
  return (struct reconnect_message){.magic = RECONNECT_MAGIC,
                                    .step = step,
                                    .channel = channel->index,
                                    .epoch = channel->epoch,
                                    .qp_num = channel->qp->qp_num,
                                    .psn = channel->endpoint->psn[channel->index],
                                    .received = channel->received,
                                    .credits = (uint16_t)channel_recv_credits(channel),
                                    .lid = channel->device->port.lid,
                                    .gid = channel->link->gid};
}

/* The peer has to hear of it, by a thread that does not have the lock. */
static int reopen(struct channel *channel, uint32_t epoch) {
  struct endpoint *endpoint = channel->endpoint;
  int status = channel_reopen(channel, epoch);
  endpoint->reconnects_pending &= ~(1u << channel->index); /* there may be no queue pair to tell of */
  if (status) return status;
  endpoint->psn[channel->index] = reconnect_random_psn();
  endpoint->reconnects_pending |= 1u << channel->index;
  return MLXDIST_OK;
}

static bool is_possible(const struct channel *channel) {
  return channel->transport->can_reconnect && channel->endpoint->usable;
}

static int begin(struct channel *channel, const char *why) {
  struct transport *transport = channel->transport;
  debug(DEBUG_WARN, "reconnect", "rank %d is reconnecting its %s queue pair to rank %d (epoch %u): %s", transport->rank,
        channel_name(channel), channel->peer, channel->epoch + 1, why);
  count(&transport->counters->reconnections, 1);
  int status = reopen(channel, channel->epoch + 1);
  transport->callbacks->on_link_down(channel->endpoint);
  return status;
}

int reconnect_begin(struct channel *channel, enum ibv_wc_status wc_status) {
  char why[192];
  snprintf(why, sizeof why, "a work request completed with %s", verbs_wc_status_name(wc_status));
  if (is_possible(channel) && channel->reconnects++ < RECONNECT_MAX) return begin(channel, why);
  if (link_give_up(channel, why)) return MLXDIST_OK;
  return fail(MLXDIST_TRANSPORT, "the queue pair between rank %d and rank %d failed%s: %s", channel->transport->rank,
              channel->peer, is_possible(channel) ? " again and again" : "", why);
}

int reconnect_silent(struct channel *channel) {
  struct channel *both = &channel->endpoint->channels[channel->index & ~1u];
  if (!is_possible(channel) || channel->reconnects++ || !both[0].open || !both[1].open) return MLXDIST_OK;
  int status = begin(&both[0], "nothing is acknowledged on this link");
  return status ? status : begin(&both[1], "nothing is acknowledged on this link");
}

bool reconnect_next(struct endpoint *endpoint, struct reconnect_message *message) {
  uint32_t pending = endpoint->reconnects_pending;
  if (!pending) return false;
  uint32_t i = (uint32_t)__builtin_ctz(pending);
  endpoint->reconnects_pending &= ~(1u << i);
  *message = message_of(&endpoint->channels[i], RECONNECT_REQ);
  return true;
}

/* Both halves are connected, and receives are posted on both. */
static int resume(struct channel *channel) {
  if (!channel_try_open(channel)) return MLXDIST_OK;
  debug(DEBUG_INFO, "reconnect", "rank %d goes on with rank %d on the new %s queue pair", channel->transport->rank,
        channel->peer, channel_name(channel));
  return channel_retransmit(channel);
}

/* `replies`: the peer is to hear that it may send. */
static int receive_request(struct channel *channel, const struct reconnect_message *message, bool *replies) {
  int32_t ahead = (int32_t)(message->epoch - channel->epoch);
  int status = MLXDIST_OK;
  if (ahead < 0) return status; /* of a queue pair that has failed again: what this rank sent has crossed it */
  if (ahead > 0) status = reopen(channel, message->epoch);
  if (status || channel->connected || !channel->qp) return status; /* without one the engine has failed already */
  status = queue_pair_connect(channel, &message->gid, message->lid, message->qp_num, message->psn,
                              channel->endpoint->psn[channel->index]);
  if (!status) status = receive_post_all(channel);
  *replies = !status;
  return status ? status : resume(channel);
}

static int receive_reply(struct channel *channel, const struct reconnect_message *message) {
  if (message->epoch != channel->epoch) return MLXDIST_OK;
  if (!wire_at_least(channel->sent, message->received) || message->credits > channel->slots)
    return fail(MLXDIST_TRANSPORT, "rank %d sent rank %d a garbled message of a reconnect", channel->peer,
                channel->transport->rank);
  channel_on_ack(channel, message->received, message->credits);
  channel_mark_answered(channel);
  return resume(channel);
}

bool reconnect_read(const struct endpoint *endpoint, const void *bytes, uint64_t length,
                    struct reconnect_message *message) {
  if (length != sizeof *message) return false;
  memcpy(message, bytes, sizeof *message);
  return message->magic == RECONNECT_MAGIC && message->channel < endpoint->channel_count;
}

bool reconnect_receive(struct endpoint *endpoint, const struct reconnect_message *message,
                       struct reconnect_message *reply) {
  struct channel *channel = &endpoint->channels[message->channel];
  bool replies = false;
  int status =
      message->step == RECONNECT_REQ ? receive_request(channel, message, &replies) : receive_reply(channel, message);
  if (replies) *reply = message_of(channel, RECONNECT_REP);
  if (status) endpoint->transport->callbacks->on_error(endpoint->transport, status);
  return replies;
}
