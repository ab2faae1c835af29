/* What happens because time has passed: repetitions, late acknowledgements, deadlines. */
#include "cable.h"
#include "deadline.h"
#include "debug.h"
#include "engine.h"
#include "keepalive.h"
#include "matching.h"
#include "operation.h"
#include "repair.h"

/* How often the timers are looked at, at most. */
#define LOOK_NS 2000000u

/* An acknowledgement waits so long for data to ride on. */
#define TELL_NS 10000000u

/* A message that was not acknowledged for so long is sent again, then after twice the time and so on. Longer than the
 * peer's progress thread sleeps and then waits for a ride. */
#define REPEAT_NS 40000000u
#define REPEAT_MOST_NS 1000000000u

static void warn_of_silence(const struct channel *channel) {
  char why[PEER_SILENCE_BYTES];
  peer_explain_silence(channel->peer, why, sizeof why);
  if (*why) debug(DEBUG_WARN, "connection", "rank %d on %s: %s", channel->engine->rank, channel->engine->host, why);
}

static int repeat(struct channel *channel, uint64_t now) {
  if (channel->acked == channel->sent && !channel_lacks_completions(channel)) {
    channel->unacked_since_ns = 0;
  } else if (!channel->unacked_since_ns || channel->seen_acked != channel->acked) {
    channel->unacked_since_ns = now;
    channel->patience_ns = REPEAT_NS;
    channel->seen_acked = channel->acked;
    channel->repeats = channel->repairs = 0;
  } else if (now - channel->unacked_since_ns > channel->patience_ns) {
    channel->unacked_since_ns = now;
    if (channel->patience_ns < REPEAT_MOST_NS) channel->patience_ns *= 2;
    int status = channel_resend(channel);
    if (status || ++channel->repeats < CABLE_REPEATS) return status;
    if (channel->repeats == CABLE_REPEATS) warn_of_silence(channel);
    status = cable_suspect(channel);
    return status || channel->repeats != REPAIR_REPEATS ? status : repair_silent(channel);
  }
  return MLXDIST_OK;
}

static void tell(struct channel *channel, uint64_t now) {
  if (channel->received == channel->told_ack) {
    channel->untold_since_ns = 0;
  } else if (!channel->untold_since_ns || channel->seen_received != channel->received) {
    channel->untold_since_ns = now;
    channel->seen_received = channel->received;
  } else if (now - channel->untold_since_ns > TELL_NS) {
    channel->must_tell = true;
  }
}

static int look_at_peer(struct peer *peer, uint64_t now) {
  int status = MLXDIST_OK;
  for (uint32_t i = 0; i < peer->channel_count && !status; i++) {
    tell(&peer->channels[i], now);
    status = repeat(&peer->channels[i], now);
    if (!status) status = keepalive_look(&peer->channels[i], now);
  }
  return status ? status : peer_acknowledge(peer, true);
}

/* An acknowledgement has no number and may be lost, with the credit that it gives: whoever waits says it again. */
static int tell_again(struct operation *operation) {
  int status = MLXDIST_OK;
  for (int i = 0; i < operation->in.count && !status; i++) {
    struct peer *peer = operation->in.list[i].lane->peer;
    status = matching_make_room(peer);
    peer->channels[WIRE_EAGER].must_tell = true;
    if (!status) status = peer_tell_ready(peer, operation->group->id, operation->in.list[i].lane->received);
  }
  return status;
}

static int look_at_operation(struct operation *operation, uint64_t now) {
  if (!operation->stuck_since_ns || operation->seen_moves != operation->moves) {
    operation->seen_moves = operation->moves;
    operation->stuck_since_ns = now;
    operation->tell_at_ns = now + REPEAT_NS;
    operation->tell_after_ns = REPEAT_NS;
    operation->noticed_at = 0;
    return MLXDIST_OK;
  }
  if (now > operation->tell_at_ns) {
    if (operation->tell_after_ns < REPEAT_MOST_NS) operation->tell_after_ns *= 2;
    operation->tell_at_ns = now + operation->tell_after_ns;
    int status = tell_again(operation);
    if (status) return status;
  }
  return deadline_look(operation, now);
}

void engine_look_at_timers(struct engine *engine, uint64_t now) {
  /* `now` may be from before another thread has looked. */
  if ((int64_t)(now - engine->timers_ns) < (int64_t)LOOK_NS || engine->ended) return;
  engine->timers_ns = now;
  int status = MLXDIST_OK;
  for (int32_t rank = 0; rank < engine->size && !status; rank++)
    if (engine->peers[rank].usable) status = look_at_peer(&engine->peers[rank], now);
  struct operation *operation = engine->active;
  while (operation && !status) {
    status = look_at_operation(operation, now);
    if (!status) operation = operation->next;
  }
  if (status) engine_fail(engine, operation, status);
}
