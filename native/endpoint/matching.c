#include "matching.h"

#include "operation.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

static void name(const struct wire_descriptor *descriptor, uint16_t group, char *text, size_t bytes) {
  layout_name(descriptor, 0, text, bytes);
  size_t used = strnlen(text, bytes);
  if (group & ~GROUP_HIDDEN) snprintf(text + used, bytes - used, " in group %u", group & ~GROUP_HIDDEN);
}

int matching_fail(const struct operation *ours, const struct peer *peer, const struct wire_descriptor *theirs,
                  uint64_t expected_bytes) {
  char ours_text[192], theirs_text[192], sizes[128] = "";
  name(&ours->receives, ours->group->id, ours_text, sizeof ours_text);
  name(theirs, ours->group->id, theirs_text, sizeof theirs_text);
  int32_t rank = ours->group->engine->rank;
  bool first = rank < peer->rank; /* in rank order, so that both ranks say the same */
  bool same_operation = theirs->operation == ours->receives.operation;
  if (!strcmp(ours_text, theirs_text) && memcmp(ours->receives.shape, theirs->shape, sizeof theirs->shape))
    snprintf(sizes, sizeof sizes, ", packed from trees that differ in paths, shapes or dtypes");
  else if (same_operation && theirs->algorithm != ours->receives.algorithm)
    snprintf(sizes, sizeof sizes, " with different algorithms: set MLXDIST_ALGO and the tuning table alike on all");
  else if (expected_bytes != UINT64_MAX && theirs->bytes != expected_bytes)
    snprintf(sizes, sizeof sizes, ", and rank %d sends %llu bytes where rank %d expects %llu", peer->rank,
             (unsigned long long)theirs->bytes, rank, (unsigned long long)expected_bytes);
  /* With another algorithm a rank may need nothing of an operation, and be at the next one. */
  return fail(MLXDIST_MISMATCH,
              "ranks disagree: rank %d calls %s, rank %d calls %s%s; all ranks must call the same "
              "operations in the same order with the same dtype and shape%s; what is carried out at once while "
              "mx.async_eval goes on needs another group",
              first ? rank : peer->rank, first ? ours_text : theirs_text, first ? peer->rank : rank,
              first ? theirs_text : ours_text, sizes, same_operation ? "" : ", by the same algorithm (MLXDIST_ALGO)");
}

void matching_read_ready(struct peer *peer, const struct wire_header *header) {
  mlxdist_group *group = engine_group(peer->channels[0].engine, header->group);
  int32_t member = group ? group->member_of[peer->rank] : -1;
  if (member < 0) return;
  struct lane *lane = &group->lanes[member];
  if (wire_at_least(header->ready, lane->ready)) lane->ready = header->ready; /* perhaps before it is sent here */
}

static bool is_for(const struct arrival *arrival, const struct stream *stream) {
  const struct wire_header *header = arrival_header(arrival);
  return header->stream == stream->number && header->group == stream->operation->group->id;
}

/* Messages of one channel come in order; those of two cables may overtake each other. */
static void attach(struct stream *stream, struct arrival *arrival) {
  uint64_t offset = arrival_header(arrival)->offset;
  if (!stream->arrived || offset > arrival_header(stream->arrived_last)->offset) {
    arrival->next = 0;
    if (stream->arrived)
      stream->arrived_last->next = arrival;
    else
      stream->arrived = arrival;
    stream->arrived_last = arrival;
    return;
  }
  struct arrival **place = &stream->arrived;
  while (*place && arrival_header(*place)->offset <= offset) place = &(*place)->next;
  arrival->next = *place;
  *place = arrival;
  if (!arrival->next) stream->arrived_last = arrival;
}

static bool has_order(const struct streams *streams, const struct lane *lane, uint32_t order) {
  for (int i = 0; i < streams->count; i++)
    if (streams->list[i].lane == lane && streams->list[i].order == order) return true;
  return false;
}

/* The operation that was issued here as collective number `order` of that group, NULL if it has ended. */
static const struct operation *issued_as(const mlxdist_group *group, const struct lane *lane, uint32_t order) {
  const struct operation *operation = group->engine->active;
  for (; operation; operation = operation->next)
    if (operation->ordered && (has_order(&operation->out, lane, order) || has_order(&operation->in, lane, order)))
      return operation;
  return 0;
}

static const struct lane *lane_of(const struct peer *peer, uint16_t id) {
  const mlxdist_group *group = engine_group(peer->channels[0].engine, id);
  int32_t member = group ? group->member_of[peer->rank] : -1;
  return member < 0 ? 0 : &group->lanes[member];
}

/* No stream expects this message. That is a mistake if this rank has come to that point of the group in another
 * operation. What it does in other groups is not looked at: another thread may do it. */
static int check_order(const struct peer *peer, const struct arrival *arrival) {
  const struct wire_header *header = arrival_header(arrival);
  const struct wire_descriptor *theirs = arrival_descriptor(arrival);
  const struct lane *lane = lane_of(peer, header->group);
  if (!theirs || !lane || !(header->flags & WIRE_ORDERED) || !wire_at_least(lane->order, header->order))
    return MLXDIST_OK;
  const struct engine *engine = peer->channels[0].engine;
  const struct operation *ours = issued_as(engine_group(engine, header->group), lane, header->order);
  /* The same call on both sides, but not the stream that is due: what came before it differs, and is about to be seen.
   */
  if (ours && !memcmp(&ours->receives, theirs, offsetof(struct wire_descriptor, bytes))) return MLXDIST_OK;
  if (ours) return matching_fail(ours, peer, theirs, UINT64_MAX);
  char text[192];
  name(theirs, header->group, text, sizeof text);
  return fail(MLXDIST_MISMATCH,
              "ranks disagree: rank %d calls %s, and what rank %d called at that point needs nothing "
              "from it; all ranks of a group must call its collectives in the same order, with the same root and the "
              "same algorithm (MLXDIST_ALGO)",
              peer->rank, text, engine->rank);
}

/* A stream of the past wants nothing more. */
static int check_late(const struct peer *peer, const struct wire_header *header) {
  const struct engine *engine = peer->channels[0].engine;
  const struct lane *lane = lane_of(peer, header->group);
  if (!lane || !wire_at_least(lane->received, header->stream)) return MLXDIST_OK;
  return fail(MLXDIST_TRANSPORT, "rank %d received %u bytes of stream %u from rank %d, which has ended already",
              engine->rank, header->length, header->stream, peer->rank);
}

/* Whether a message that came by another cable than at first has come by that one, too. */
static bool is_known(const struct peer *peer, const struct stream *stream, const struct arrival *arrival) {
  const struct wire_header *header = arrival_header(arrival);
  const struct arrival *other = stream ? stream->arrived : peer->early;
  for (; other; other = other->next) {
    const struct wire_header *theirs = arrival_header(other);
    if (theirs->group == header->group && theirs->stream == header->stream && theirs->offset == header->offset)
      return true;
  }
  if (stream) return stream->started && header->offset < stream->moved + !stream->bytes;
  const struct lane *lane = lane_of(peer, header->group);
  return lane && wire_at_least(lane->received, header->stream);
}

/* Whether a message should leave its slot: data that nobody takes now would keep others from getting past. Nobody
 * takes what is early, what belongs to an operation that waits for somebody else, and what has overtaken a message on
 * another cable, which may be lost there and then come by this one. */
static bool should_spill(const struct arrival *arrival, const struct stream *stream) {
  const struct channel *channel = arrival->channel;
  if (!channel_is_crowded(channel)) return false;
  if (!stream || channel->engine->active_count > 1) return true;
  const struct arrival *first = stream->arrived ? stream->arrived : arrival;
  return channel->peer->channel_count > 2 && arrival_header(first)->offset > stream->moved;
}

int matching_deliver(struct peer *peer, struct arrival *arrival) {
  struct stream *stream = peer->expected;
  while (stream && !is_for(arrival, stream)) stream = stream->next;
  int status = MLXDIST_OK;
  if (arrival_header(arrival)->flags & WIRE_AGAIN && is_known(peer, stream, arrival)) return channel_release(arrival);
  if (!stream) {
    status = check_late(peer, arrival_header(arrival));
    if (!status) status = check_order(peer, arrival);
  }
  if (!status && should_spill(arrival, stream)) status = channel_spill(&arrival);
  if (stream) {
    attach(stream, arrival);
    return status;
  }
  arrival->next = 0;
  if (peer->early)
    peer->early_last->next = arrival;
  else
    peer->early = arrival;
  peer->early_last = arrival;
  return status;
}

static void take_early(struct peer *peer, struct stream *stream) {
  struct arrival **place = &peer->early, *last = 0;
  while (*place) {
    struct arrival *arrival = *place;
    if (is_for(arrival, stream)) {
      *place = arrival->next;
      attach(stream, arrival);
      continue;
    }
    last = arrival;
    place = &arrival->next;
  }
  peer->early_last = last;
}

void matching_expect(struct stream *stream) {
  struct peer *peer = stream->lane->peer;
  stream->next = 0;
  if (peer->expected)
    peer->expected_last->next = stream;
  else
    peer->expected = stream;
  peer->expected_last = stream;
  if (peer->early) take_early(peer, stream);
}

int matching_check_early(const struct peer *peer) {
  int status = MLXDIST_OK;
  for (const struct arrival *arrival = peer->early; arrival && !status; arrival = arrival->next)
    status = check_order(peer, arrival);
  return status;
}

static int spill_held(struct stream *stream) {
  int status = MLXDIST_OK;
  for (struct arrival **place = &stream->arrived; *place && !status; place = &(*place)->next) {
    struct arrival *next = (*place)->next;
    if ((*place)->on_heap || !channel_is_crowded((*place)->channel)) continue;
    status = channel_spill(place);
    (*place)->next = next;
    if (!next) stream->arrived_last = *place;
  }
  return status;
}

int matching_make_room(struct peer *peer) {
  if (!peer->expected) return MLXDIST_OK;
  if (peer->channel_count <= 2 && peer->channels[0].engine->active_count <= 1) return MLXDIST_OK;
  int status = MLXDIST_OK;
  for (struct stream *stream = peer->expected; stream && !status; stream = stream->next) status = spill_held(stream);
  return status;
}

int matching_forget(struct stream *stream) {
  struct peer *peer = stream->lane->peer;
  struct stream **place = &peer->expected, *before = 0;
  while (*place && *place != stream) {
    before = *place;
    place = &before->next;
  }
  if (*place) {
    *place = stream->next;
    if (peer->expected_last == stream) peer->expected_last = before;
  }
  int status = MLXDIST_OK;
  while (stream->arrived) {
    struct arrival *arrival = stream->arrived;
    stream->arrived = arrival->next;
    int released = channel_release(arrival);
    if (!status) status = released;
  }
  return status;
}
