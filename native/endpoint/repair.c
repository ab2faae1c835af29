#include "repair.h"

#include "debug.h"
#include "engine.h"
#include "progress.h"
#include "queue_pair.h"
#include "wc_status.h"

#include <stdio.h>
#include <string.h>

#define REPAIR_MAGIC 0x5244584du /* "MXDR" */

enum repair_step { REPAIR = 1, REPAIRED = 2 };

struct repair_message {
  uint32_t magic;
  uint32_t step;
  uint32_t channel, epoch;
  uint32_t qp_num, psn;
  uint32_t received; /* sequence of the last message that the sender of this has */
  uint16_t room;     /* so many more it has receives for */
  uint16_t lid;
  union ibv_gid gid;
};

static struct repair_message message_of(const struct channel *channel, enum repair_step step) {
  return (struct repair_message){.magic = REPAIR_MAGIC,
                                 .step = step,
                                 .channel = channel->index,
                                 .epoch = channel->epoch,
                                 .qp_num = channel->qp->qp_num,
                                 .psn = channel->peer->psn[channel->index],
                                 .received = channel->received,
                                 .room = (uint16_t)channel_room(channel),
                                 .lid = channel->device->port.lid,
                                 .gid = channel->link->gid};
}

static void send_message(struct engine *engine, int32_t to, const struct repair_message *message) {
  engine->side_channel(engine->side_channel_context, to, message, sizeof *message);
}

/* The peer has to be told, by a thread that does not have the lock. */
static int reopen(struct channel *channel, uint32_t epoch) {
  struct peer *peer = channel->peer;
  int status = channel_reopen(channel, epoch);
  peer->psn[channel->index] = peer_random_psn();
  peer->repairs_untold |= 1u << channel->index;
  return status;
}

static bool is_possible(const struct channel *channel) {
  return channel->engine->side_channel && channel->peer->usable;
}

static int begin(struct channel *channel, const char *why) {
  struct engine *engine = channel->engine;
  debug(DEBUG_WARN, "repair", "rank %d makes the %s queue pair to rank %d anew (%u): %s", engine->rank,
        channel_name(channel), channel->peer->rank, channel->epoch + 1, why);
  count(&engine->counters.reconnections, 1);
  int status = reopen(channel, channel->epoch + 1);
  progress_call(engine);
  return status;
}

int repair_begin(struct channel *channel, enum ibv_wc_status wc_status) {
  char why[192];
  snprintf(why, sizeof why, "a work request completed with %s", verbs_wc_status_name(wc_status));
  if (is_possible(channel) && channel->repairs++ < REPAIR_MOST) return begin(channel, why);
  return fail(MLXDIST_TRANSPORT, "the queue pair between rank %d and rank %d failed%s: %s", channel->engine->rank,
              channel->peer->rank, is_possible(channel) ? " again and again" : "", why);
}

int repair_silent(struct channel *channel) {
  struct channel *both = &channel->peer->channels[channel->index & ~1u];
  if (!is_possible(channel) || channel->repairs++ || !both[0].open || !both[1].open) return MLXDIST_OK;
  int status = begin(&both[0], "nothing is confirmed on this cable");
  return status ? status : begin(&both[1], "nothing is confirmed on this cable");
}

static void tell_peer(struct engine *engine, struct peer *peer) {
  for (uint32_t i = 0; i < peer->channel_count; i++) {
    engine_lock(engine);
    bool due = peer->repairs_untold >> i & 1;
    peer->repairs_untold &= ~(1u << i);
    struct repair_message message;
    if (due) message = message_of(&peer->channels[i], REPAIR);
    engine_unlock(engine);
    if (due) send_message(engine, peer->rank, &message);
  }
}

void repair_tell(struct engine *engine) {
  for (int32_t rank = 0; rank < engine->size; rank++)
    if (atomic_load_explicit(&engine->peers[rank].repairs_untold, memory_order_relaxed))
      tell_peer(engine, &engine->peers[rank]);
}

/* With the lock. Both halves are connected, and receives are posted on both. */
static int resume(struct channel *channel) {
  if (!channel->connected || !channel->answered) return MLXDIST_OK;
  channel->open = true;
  debug(DEBUG_INFO, "repair", "rank %d goes on with rank %d on the new %s queue pair", channel->engine->rank,
        channel->peer->rank, channel_name(channel));
  return channel_resend(channel);
}

/* With the lock. `answers`: the peer is to be told that it may send. */
static int take_repair(struct channel *channel, const struct repair_message *message, bool *answers) {
  int32_t ahead = (int32_t)(message->epoch - channel->epoch);
  int status = MLXDIST_OK;
  *answers = false;
  if (ahead < 0) return status; /* of a queue pair that has failed again: what this rank sent has crossed it */
  if (ahead > 0) status = reopen(channel, message->epoch);
  if (status || channel->connected) return status;
  status = queue_pair_connect(channel, &message->gid, message->lid, message->qp_num, message->psn,
                              channel->peer->psn[channel->index]);
  if (!status) status = channel_post_all(channel);
  *answers = !status;
  return status ? status : resume(channel);
}

static int take_repaired(struct channel *channel, const struct repair_message *message) {
  if (message->epoch != channel->epoch) return MLXDIST_OK;
  if (!wire_at_least(channel->sent, message->received) || message->room > channel->slots)
    return fail(MLXDIST_TRANSPORT, "rank %d sent rank %d a garbled message of a repair", channel->peer->rank,
                channel->engine->rank);
  channel_hear(channel, message->received, message->room);
  channel->answered = true;
  return resume(channel);
}

bool repair_take(struct engine *engine, struct peer *peer, const void *bytes, uint64_t length, int *status) {
  struct repair_message message, answer;
  if (length != sizeof message) return false;
  memcpy(&message, bytes, sizeof message);
  if (message.magic != REPAIR_MAGIC || message.channel >= peer->channel_count) return false;
  bool answers = false;
  struct channel *channel = &peer->channels[message.channel];
  engine_lock(engine);
  if (message.step == REPAIR)
    *status = take_repair(channel, &message, &answers);
  else
    *status = take_repaired(channel, &message);
  if (answers) answer = message_of(channel, REPAIRED);
  engine_unlock(engine);
  repair_tell(engine); /* first its own address, if this queue pair is new too */
  if (answers) send_message(engine, peer->rank, &answer);
  return true;
}
