/* How an operation gets on: the streams of its round, piece by piece. */
#include "operation.h"
#include "matching.h"
#include "region.h"

#include <string.h>

static uint64_t at_most(uint64_t a, uint64_t b) { return a < b ? a : b; }

static bool is_small(const struct stream *stream) { return stream->bytes <= CHANNEL_EAGER_BYTES - CHANNEL_OVERHEAD; }

/* The same on both sides: pieces of a stream are as large as a slot allows. */
static uint64_t piece_bytes(const struct stream *stream) {
  uint32_t bulk = stream->operation->group->engine->options.bulk_slot_bytes;
  return (is_small(stream) ? CHANNEL_EAGER_BYTES : bulk) - CHANNEL_OVERHEAD;
}

/* Cables that its pieces may take. */
static uint32_t links_of(const struct stream *stream) { return stream->lane->peer->channel_count / 2; }

static uint32_t on_their_way(const struct channel *channel) { return channel->sent - channel->acked; }

static bool is_less_busy(const struct channel *a, const struct channel *b) {
  if (on_their_way(a) != on_their_way(b)) return on_their_way(a) < on_their_way(b);
  return !wire_at_least(a->sent, b->sent);
}

/* The channel for the next piece: of several cables the one with the fewest messages on their way, or so far. */
static struct channel *channel_of(const struct stream *stream) {
  struct peer *peer = stream->lane->peer;
  if (is_small(stream)) return peer_eager(peer);
  struct channel *best = 0;
  for (uint32_t i = WIRE_BULK; i < peer->channel_count; i += 2) {
    struct channel *channel = &peer->channels[i];
    if (peer->dead_links >> i / 2 & 1) continue;
    if (!best || is_less_busy(channel, best)) best = channel;
  }
  return best;
}

/* What left from the user's memory may have to leave again: it has to stay as it is until it is confirmed, and has left
 * as often as it was sent. */
static bool is_confirmed(const struct stream *stream) {
  for (uint32_t i = 0; stream->from_region >> i; i++) {
    const struct channel *channel = &stream->lane->peer->channels[i];
    bool here = stream->from_region >> i & 1;
    if (here && !(wire_at_least(channel->acked, stream->unconfirmed[i]) && channel_is_clear(channel))) return false;
  }
  return true;
}

static bool is_sent(const struct stream *stream) {
  return stream->started && stream->moved == stream->bytes && is_confirmed(stream);
}

static bool is_received(const struct stream *stream) { return stream->started && stream->moved == stream->bytes; }

static bool may_send(const struct stream *stream, const struct channel *channel) {
  if (stream->started && stream->moved == stream->bytes) return false;
  bool asked =
      stream->moved < stream_unasked_bytes(channel->engine) || wire_at_least(stream->lane->ready, stream->number);
  return asked && channel_can_send(channel, WIRE_DATA);
}

/* Where the result takes their place, each result waits until its piece is confirmed. While several others are on their
 * way through memory that costs less than a copy; else pieces are copied, even from registered memory. */
#define IN_PLACE_PIECES 4

static bool leaves_uncopied(const struct stream *stream, const struct channel *channel, bool in_place) {
  if (!stream->region || !in_place) return stream->region;
  const struct verbs *verbs = channel->device->verbs;
  return stream->bytes >= IN_PLACE_PIECES * piece_bytes(stream) && verbs->is_by_memory &&
         verbs->is_by_memory(channel->qp);
}

/* Sends the next piece, if there is a slot and a receive for it. */
static int push(struct operation *operation, struct stream *stream, bool in_place, bool *moved) {
  struct channel *channel = channel_of(stream);
  if (!may_send(stream, channel)) return MLXDIST_OK;
  uint64_t piece = piece_bytes(stream), left = stream->bytes - stream->moved;
  struct wire_descriptor descriptor;
  struct outgoing_message message = {
      .kind = WIRE_DATA,
      .flags = operation->ordered ? WIRE_ORDERED : 0,
      .group = operation->group->id,
      .stream = stream->number,
      .ready = stream->lane->received,
      .order = stream->order,
      .offset = stream->moved,
      .payload = stream->data ? stream->data + stream->moved : 0, /* a barrier sends nothing */
      .length = (uint32_t)at_most(left, piece),
      .counters = &operation->group->counters,
  };
  if (!stream->started) {
    descriptor = operation->sends;
    descriptor.bytes = stream->bytes;
    message.descriptor = &descriptor;
  }
  if (leaves_uncopied(stream, channel, in_place))
    message.user_lkey = region_lkey(stream->region, channel->device, message.payload, message.length);
  if (message.user_lkey && left <= piece * links_of(stream)) message.flags |= WIRE_CONFIRM;
  int status = channel_send(channel, &message);
  if (message.user_lkey) {
    stream->unconfirmed[channel->index] = channel->sent;
    stream->from_region |= 1u << channel->index;
  }
  stream->started = true;
  stream->moved += message.length;
  *moved = true;
  return status;
}

static bool describes(const struct wire_descriptor *a, const struct wire_descriptor *b, uint64_t bytes) {
  struct wire_descriptor expected = *a;
  expected.bytes = bytes;
  return memcmp(&expected, b, sizeof expected) == 0;
}

/* The first message of the stream says what the peer is doing. */
static int check_first(struct operation *operation, struct stream *stream, const struct arrival *arrival) {
  const struct peer *peer = stream->lane->peer;
  const struct wire_header *header = arrival_header(arrival);
  const struct wire_descriptor *theirs = arrival_descriptor(arrival);
  bool ordered = header->flags & WIRE_ORDERED;
  if (!theirs || header->offset != 0)
    return fail(MLXDIST_TRANSPORT, "rank %d received stream %u from rank %d without its beginning",
                operation->group->engine->rank, stream->number, peer->rank);
  if (!describes(&operation->receives, theirs, stream->bytes))
    return matching_fail(operation, peer, theirs, stream->bytes);
  if (ordered && operation->ordered && header->order != stream->order)
    return fail(MLXDIST_MISMATCH,
                "ranks disagree on the order of the collectives of group %u: the same one is number "
                "%u on rank %d and %u on rank %d",
                operation->group->id, stream->order - WIRE_START, operation->group->engine->rank,
                header->order - WIRE_START, peer->rank);
  stream->started = true;
  return MLXDIST_OK;
}

/* The next piece of the stream, checked to be the one that is due; NULL if it has not arrived. */
static int next_piece(struct operation *operation, struct stream *stream, struct arrival **arrival) {
  *arrival = stream->arrived;
  if (!*arrival) return MLXDIST_OK;
  const struct wire_header *header = arrival_header(*arrival);
  if (header->offset > stream->moved && stream->lane->peer->channel_count > 2) {
    *arrival = 0; /* it has overtaken another one, which comes by the other cable */
    return MLXDIST_OK;
  }
  if (!stream->started) {
    int status = check_first(operation, stream, *arrival);
    if (status) return status;
  }
  if (header->offset == stream->moved && header->length == at_most(stream->bytes - stream->moved, piece_bytes(stream)))
    return MLXDIST_OK;
  return fail(MLXDIST_TRANSPORT,
              "rank %d expected stream %u at byte %llu from rank %d and received byte %llu (%u "
              "bytes)",
              operation->group->engine->rank, stream->number, (unsigned long long)stream->moved,
              stream->lane->peer->rank, (unsigned long long)header->offset, header->length);
}

static int release_piece(struct operation *operation, struct stream *stream) {
  struct arrival *arrival = stream->arrived;
  uint32_t length = arrival_header(arrival)->length;
  stream->arrived = arrival->next;
  stream->moved += length;
  count(&operation->group->counters.payload_bytes_received, length);
  return channel_release(arrival);
}

/* Copies the next piece of a stream to its place. */
static int pull(struct operation *operation, struct stream *stream, bool *moved) {
  if (is_received(stream)) return MLXDIST_OK;
  struct arrival *arrival;
  int status = next_piece(operation, stream, &arrival);
  if (status || !arrival) return status;
  uint32_t length = arrival_header(arrival)->length;
  if (length) memcpy(stream->data + stream->moved, arrival_payload(arrival), length);
  count(&operation->group->counters.bytes_copied, length);
  *moved = true;
  return release_piece(operation, stream);
}

/* Whether all streams have sent as much as the fold has with its next piece, and none may have to send again from where
 * that goes. Pieces behind it may be on their way. */
static bool may_overwrite(const struct operation *operation, const struct round *round, uint32_t length) {
  const char *to = round->fold.out + round->fold.done;
  for (int i = round->first_out; i < round->first_out + round->outs; i++) {
    const struct stream *stream = &operation->out.list[i];
    if (stream->moved < at_most(round->fold.done + length, stream->bytes)) return false;
    for (uint32_t c = 0; stream->from_region >> c; c++)
      if (stream->from_region >> c & 1 && channel_keeps(&stream->lane->peer->channels[c], to, length)) return false;
  }
  return true;
}

/* Reduces the next piece once every peer's has arrived. */
static int fold(struct operation *operation, struct round *round, bool *moved) {
  struct fold *fold = &round->fold;
  struct stream *in = &operation->in.list[round->first_in];
  if (is_received(&in[round->ins - 1])) return MLXDIST_OK;
  const void *sources[GROUP_MAX_RANKS];
  uint32_t length = 0;
  int n = 0;
  for (int i = 0; i < round->ins; i++) {
    struct arrival *arrival;
    int status = next_piece(operation, &in[i], &arrival);
    if (status || !arrival) return status;
    if (i == fold->own_place) sources[n++] = fold->own + fold->done;
    sources[n++] = arrival_payload(arrival);
    length = arrival_header(arrival)->length;
  }
  if (n == round->ins) sources[n++] = fold->own + fold->done;
  if (fold->in_place && !may_overwrite(operation, round, length)) return MLXDIST_OK;
  if (length) fold->kernel(fold->out + fold->done, sources, n, length / fold->element_bytes);
  fold->done += length;
  *moved = true;
  for (int i = 0; i < round->ins; i++) {
    int status = release_piece(operation, &in[i]);
    if (status) return status;
  }
  return MLXDIST_OK;
}

static bool is_over(const struct operation *operation, const struct round *round) {
  for (int i = 0; i < round->ins; i++)
    if (!is_received(&operation->in.list[round->first_in + i])) return false;
  for (int i = 0; i < round->outs; i++)
    if (!is_sent(&operation->out.list[round->first_out + i])) return false;
  return true;
}

static int step_round(struct operation *operation, struct round *round, bool *moved) {
  int status = MLXDIST_OK;
  if (!round->begun && round->copy_bytes) {
    memcpy(round->copy_to, round->copy_from, round->copy_bytes);
    count(&operation->group->counters.bytes_copied, round->copy_bytes);
  }
  round->begun = true;
  bool in_place = round->folds && round->fold.in_place;
  for (int i = 0; i < round->outs && !status; i++)
    status = push(operation, &operation->out.list[round->first_out + i], in_place, moved);
  if (round->folds && round->ins > 0 && !status) status = fold(operation, round, moved);
  for (int i = 0; i < round->ins && !status && !round->folds; i++)
    status = pull(operation, &operation->in.list[round->first_in + i], moved);
  return status;
}

/* All data has come, but a peer that sent some of it has failed in this very operation: so does this rank. */
static int check_aborted(const struct operation *operation) {
  for (int i = 0; i < operation->in.count; i++) {
    const struct stream *stream = &operation->in.list[i];
    const struct peer *peer = stream->lane->peer;
    bool here = peer->failed && peer->failed_group == operation->group->id;
    if (here && !wire_at_least(peer->failed_after, stream->number))
      return failure_check(&operation->group->engine->failure);
  }
  return MLXDIST_OK;
}

int operation_step(struct operation *operation, bool *moved) {
  bool got_on = false;
  int status = MLXDIST_OK;
  while (operation->current < operation->round_count && !status) {
    struct round *round = &operation->rounds[operation->current];
    status = step_round(operation, round, &got_on);
    if (status || !is_over(operation, round)) break;
    operation->current++;
    got_on = true;
  }
  if (got_on) {
    operation->moves++;
    operation->group->engine->moves++;
    *moved = true;
  }
  if (status || operation->current < operation->round_count) return status;
  status = check_aborted(operation);
  if (!status) operation_end(operation, MLXDIST_OK);
  return status;
}

/* It waits here for those of other members, with which it will be folded. */
static bool has_next_piece(const struct stream *stream) {
  return stream->arrived && arrival_header(stream->arrived)->offset == stream->moved;
}

static const struct stream *late_stream(const struct operation *operation, bool *receives) {
  if (operation->current >= operation->round_count) return 0;
  const struct round *round = &operation->rounds[operation->current];
  *receives = true;
  for (int i = 0; i < round->ins; i++) {
    const struct stream *stream = &operation->in.list[round->first_in + i];
    if (!is_received(stream) && !has_next_piece(stream)) return stream;
  }
  *receives = false;
  for (int i = 0; i < round->outs; i++) {
    const struct stream *stream = &operation->out.list[round->first_out + i];
    if (!is_sent(stream)) return stream;
  }
  return 0;
}

/* What it has sent, or that it is ready for what is sent to it, shows that it is there. */
static bool has_entered(const struct operation *operation, const struct lane *lane) {
  for (int i = 0; i < operation->in.count; i++) {
    const struct stream *stream = &operation->in.list[i];
    if (stream->lane == lane && (stream->started || stream->arrived)) return true;
  }
  for (int i = 0; i < operation->out.count; i++) {
    const struct stream *stream = &operation->out.list[i];
    if (stream->lane == lane && wire_at_least(lane->ready, stream->number)) return true;
  }
  return false;
}

/* What waits for a slot, or for an acknowledgement, does without the peer's program. */
static bool needs_entry(const struct stream *stream, bool receives) {
  if (receives) return true;
  return stream->moved < stream->bytes && stream->moved >= stream_unasked_bytes(stream->operation->group->engine) &&
         !wire_at_least(stream->lane->ready, stream->number);
}

struct lateness operation_late(const struct operation *operation) {
  bool receives = false;
  const struct stream *stream = late_stream(operation, &receives);
  if (!stream) return (struct lateness){.rank = -1, .entered = true};
  return (struct lateness){.rank = stream->lane->peer->rank,
                           .entered = has_entered(operation, stream->lane),
                           .receives = receives,
                           .needs_entry = needs_entry(stream, receives),
                           .stream = stream->number};
}
