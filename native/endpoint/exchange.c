#include "exchange.h"

#include <string.h>

/* The same on both sides: pieces of a stream are as large as a slot allows. */
static uint64_t piece_bytes(const struct channel *channel) { return channel->slot_bytes - CHANNEL_OVERHEAD; }

static uint64_t at_most(uint64_t a, uint64_t b) { return a < b ? a : b; }

static bool finished(const struct stream *stream) { return stream->started && stream->moved == stream->bytes; }

/* Sends the next piece, if there is a slot and a receive for it. */
static int push(struct exchange *exchange, struct stream *stream, bool *moved) {
  struct channel *channel = peer_channel(stream->peer, stream->bytes);
  if (finished(stream) || !channel_can_send(channel, WIRE_DATA)) return MLXDIST_OK;
  struct wire_descriptor descriptor;
  struct outgoing_message message = {
      .kind = WIRE_DATA,
      .stream = stream->peer->streams_sent,
      .offset = stream->moved,
      .payload = stream->data + stream->moved,
      .length = (uint32_t)at_most(stream->bytes - stream->moved, piece_bytes(channel)),
  };
  if (!stream->started) {
    descriptor = exchange->sends;
    descriptor.bytes = stream->bytes;
    message.descriptor = &descriptor;
  }
  int status = channel_send(channel, &message);
  stream->started = true;
  stream->moved += message.length;
  *moved = true;
  return status;
}

static int fail_mismatch(const struct exchange *exchange, const struct peer *peer,
                         const struct wire_descriptor *theirs) {
  char ours_text[192], theirs_text[192];
  layout_name(&exchange->receives, ours_text, sizeof ours_text);
  layout_name(theirs, theirs_text, sizeof theirs_text);
  int32_t rank = exchange->group->engine.rank;
  bool first = rank < peer->rank; /* in rank order, so that both ranks say the same */
  return fail(MLXDIST_MISMATCH, "ranks disagree: rank %d calls %s, rank %d calls %s; all ranks must call the same "
              "operations in the same order with the same dtype and shape",
              first ? rank : peer->rank, first ? ours_text : theirs_text, first ? peer->rank : rank,
              first ? theirs_text : ours_text);
}

static bool describes(const struct wire_descriptor *a, const struct wire_descriptor *b, uint64_t bytes) {
  struct wire_descriptor expected = *a;
  expected.bytes = bytes;
  return memcmp(&expected, b, sizeof expected) == 0;
}

/* A peer in another operation may have chosen the other channel, where nobody would ever look. */
static int check_other_channel(const struct exchange *exchange, const struct stream *stream,
                               const struct channel *channel) {
  struct message message;
  const struct channel *other = &stream->peer->channels[channel->index == WIRE_EAGER ? WIRE_BULK : WIRE_EAGER];
  if (!channel_head(other, &message) || message.header->stream != stream->peer->streams_received) return MLXDIST_OK;
  if (!message.descriptor)
    return fail(MLXDIST_TRANSPORT, "rank %d sent data on the wrong queue pair", stream->peer->rank);
  return fail_mismatch(exchange, stream->peer, message.descriptor);
}

/* The next piece of the stream, if it has arrived: checked to be the one that is due. */
static int next_piece(const struct exchange *exchange, struct stream *stream, struct message *message, bool *there) {
  struct channel *channel = peer_channel(stream->peer, stream->bytes);
  *there = channel_head(channel, message);
  const struct wire_header *header = message->header;
  if (!stream->started && (!*there || header->stream != stream->peer->streams_received)) {
    int status = check_other_channel(exchange, stream, channel);
    if (status) return status;
  }
  if (!*there) return MLXDIST_OK;
  if (!stream->started && message->descriptor) {
    if (!describes(&exchange->receives, message->descriptor, stream->bytes))
      return fail_mismatch(exchange, stream->peer, message->descriptor);
    stream->started = true;
  }
  if (!stream->started || header->stream != stream->peer->streams_received || header->offset != stream->moved ||
      header->length != at_most(stream->bytes - stream->moved, piece_bytes(channel)))
    return fail(MLXDIST_TRANSPORT, "rank %d expected stream %u at byte %llu from rank %d and received stream %u at "
                "byte %llu (%u bytes)", exchange->group->engine.rank, stream->peer->streams_received,
                (unsigned long long)stream->moved, stream->peer->rank, header->stream,
                (unsigned long long)header->offset, header->length);
  return MLXDIST_OK;
}

static int release(struct stream *stream, uint32_t length) {
  stream->moved += length;
  return channel_release(peer_channel(stream->peer, stream->bytes));
}

/* Copies the next piece of a stream to its place. */
static int pull(struct exchange *exchange, struct stream *stream, bool *moved) {
  if (finished(stream)) return MLXDIST_OK;
  struct message message;
  bool there;
  int status = next_piece(exchange, stream, &message, &there);
  if (status || !there) return status;
  uint32_t length = message.header->length;
  if (length) memcpy(stream->data + stream->moved, message.payload, length);
  count(&exchange->group->engine.counters.bytes_copied, length);
  *moved = true;
  return release(stream, length);
}

static bool may_overwrite(const struct exchange *exchange, uint64_t end) {
  for (int i = 0; i < exchange->outs; i++)
    if (exchange->out[i].moved < at_most(end, exchange->out[i].bytes)) return false;
  return true;
}

/* Reduces the next piece once every peer's has arrived. */
static int fold(struct exchange *exchange, bool *moved) {
  struct fold *fold = exchange->fold;
  if (exchange->ins == 0 || finished(&exchange->in[exchange->ins - 1])) return MLXDIST_OK;
  const void *sources[GROUP_MAX_RANKS];
  uint32_t length = 0;
  int n = 0;
  bool own_placed = false;
  for (int i = 0; i < exchange->ins; i++) { /* in rank order */
    struct message message;
    bool there;
    int status = next_piece(exchange, &exchange->in[i], &message, &there);
    if (status || !there) return status;
    if (!own_placed && exchange->in[i].peer->rank > exchange->group->engine.rank) {
      sources[n++] = fold->own + fold->done;
      own_placed = true;
    }
    sources[n++] = message.payload;
    length = message.header->length;
  }
  if (!own_placed) sources[n++] = fold->own + fold->done;
  if (fold->in_place && !may_overwrite(exchange, fold->done + length)) return MLXDIST_OK;
  if (length) fold->kernel(fold->out + fold->done, sources, n, length / fold->element_bytes);
  fold->done += length;
  *moved = true;
  for (int i = 0; i < exchange->ins; i++) {
    int status = release(&exchange->in[i], length);
    if (status) return status;
  }
  return MLXDIST_OK;
}

static int turn(struct exchange *exchange, bool *moved) {
  int status = MLXDIST_OK;
  for (int i = 0; i < exchange->outs && !status; i++) status = push(exchange, &exchange->out[i], moved);
  if (exchange->fold) {
    if (!status) status = fold(exchange, moved);
  } else {
    for (int i = 0; i < exchange->ins && !status; i++) status = pull(exchange, &exchange->in[i], moved);
  }
  if (!status) status = engine_poll(&exchange->group->engine, moved);
  if (!status) status = engine_acknowledge(&exchange->group->engine, true);
  return status;
}

static int fail_deadline(const struct exchange *exchange, int32_t late, double waited) {
  char doing[192];
  layout_name(&exchange->receives, doing, sizeof doing);
  return fail(MLXDIST_TIMEOUT, "rank %d waited %.1f s in %s for rank %d without any progress; is that rank still "
              "working, or in another operation? MLXDIST_TIMEOUT=seconds allows more time (0: no limit)",
              exchange->group->engine.rank, waited, doing, late);
}

/* The first stream that is not finished, NULL when all is done. */
static const struct stream *unfinished(const struct stream *streams, int count) {
  for (int i = 0; i < count; i++)
    if (!finished(&streams[i])) return &streams[i];
  return 0;
}

static int idle(struct exchange *exchange, struct waiting *wait, const struct peer *late) {
  struct engine *engine = &exchange->group->engine;
  double waited = 0;
  int status = engine_idle(engine, wait, &waited);
  if (!status && engine->options.timeout > 0 && waited > engine->options.timeout)
    status = fail_deadline(exchange, late->rank, waited);
  return status;
}

static int run(struct exchange *exchange, struct waiting *wait) {
  struct engine *engine = &exchange->group->engine;
  for (;;) {
    const struct stream *late = unfinished(exchange->in, exchange->ins);
    if (!late) late = unfinished(exchange->out, exchange->outs);
    if (!late) return MLXDIST_OK;
    bool moved = false;
    int status = turn(exchange, &moved);
    if (!status && moved) count(&engine->counters.wait_ns, wait_over(wait));
    if (!status && !moved) status = idle(exchange, wait, late->peer);
    if (status) return status;
  }
}

/* All data has come, but a peer that sent some of it has failed in this very operation: so does this rank. */
static int check_aborted(const struct exchange *exchange) {
  for (int i = 0; i < exchange->ins; i++) {
    const struct peer *peer = exchange->in[i].peer;
    if (peer->failed && !wire_at_least(peer->streams_done_there, peer->streams_received))
      return failure_check(&exchange->group->engine.failure);
  }
  return MLXDIST_OK;
}

int exchange_run(struct exchange *exchange) {
  struct waiting wait = {0};
  for (int i = 0; i < exchange->outs; i++) exchange->out[i].peer->streams_sent++;
  for (int i = 0; i < exchange->ins; i++) exchange->in[i].peer->streams_received++;
  int status = run(exchange, &wait);
  if (!status) status = check_aborted(exchange);
  for (int i = 0; i < exchange->outs && !status; i++)
    exchange->out[i].peer->streams_done = exchange->out[i].peer->streams_sent;
  count(&exchange->group->engine.counters.wait_ns, wait_over(&wait));
  return status;
}
