#include "meeting.h"

#include "deadline.h"
#include "debug.h"
#include "operation.h"

#include <string.h>

/* A request without an answer is repeated after this time, since acknowledgements may be lost, then after twice the
 * time and so on: a peer that is stopped has few receives for them. */
#define REPEAT_NS 40000000u
#define REPEAT_MOST_NS 1000000000u

/* A peer that comes so much later than this rank is compiling or loading, not just slower, and may be again. */
#define LATE_NS 1000000000u

#define LOOK_NS 10000000u /* between two looks at what other ranks wait for */

#define SIDE_MAGIC 0x4d44584du /* "MXDM" */

/* Where there is no queue pair: what is in the header of an acknowledgement elsewhere. */
struct side_message {
  uint32_t magic, counts[MEETING_KINDS], until;
  uint64_t request; /* 0: none */
};

/* A peer that is waited for, until it has come to that number. */
struct partner {
  struct peer *peer;
  uint32_t number;
  uint64_t request_at_ns, pause_ns; /* of the next request; pause_ns is 0 before the first */
};

/* The operation that this thread is about to hand over. */
struct partners {
  int count;
  struct partner list[GROUP_MAX_RANKS];
  enum meeting_kind kind;
  uint32_t numbers[GROUP_MAX_RANKS]; /* of a collective, for each member */
  uint32_t asked;                    /* the set of the last requests */
  uint64_t begun_ns, look_at_ns, needed_since_ns;
  bool is_counted;
  double noticed_at;
};

static _Thread_local struct partners partners;
static _Thread_local bool is_counted; /* the operation that this thread is about to call */

void meeting_init(struct meeting *meeting) {
  for (int kind = 0; kind < MEETING_KINDS; kind++) {
    atomic_init(&meeting->arrived[kind], WIRE_START);
    atomic_init(&meeting->there[kind], WIRE_START);
    meeting->announced[kind] = WIRE_START;
  }
  atomic_init(&meeting->received, WIRE_START);
  atomic_init(&meeting->until, 3 * WIRE_START + MEETING_OPERATIONS);
}

/* Of the operations of all kinds: both ranks have the same at the same operation. */
static uint32_t total(const struct meeting *meeting) {
  return meeting->arrived[MEETING_COLLECTIVES] + meeting->arrived[MEETING_SENDS] + meeting->received;
}

/* Operations that meet in any case, after those that this rank has come to. Far too many where `until` is past. */
static uint32_t left_until(const struct meeting *meeting, uint32_t until) { return until - total(meeting); }

static uint32_t set_of(const struct engine *engine) { return 1u << engine->rank % MEETING_SET_BITS; }

static bool owes(const struct meeting *meeting, int kind) {
  return meeting->requests >> kind & 1 && wire_at_least(meeting->arrived[kind], meeting->requested[kind]);
}

bool meeting_owes_answer(const struct peer *peer) {
  const struct meeting *meeting = &peer->meeting;
  return meeting->requests && (owes(meeting, MEETING_COLLECTIVES) || owes(meeting, MEETING_SENDS));
}

/* Whether the peer waits for something that this rank has not come to. */
static bool awaits(const struct meeting *meeting) {
  for (int kind = 0; kind < MEETING_KINDS; kind++)
    if (meeting->requests >> kind & 1 && !owes(meeting, kind)) return true;
  return false;
}

/* With the lock: this rank, and those that wait for it to come somewhere. */
static uint32_t waiting_set(const struct engine *engine, bool *is_circle) {
  uint32_t set = 0;
  for (int32_t rank = 0; rank < engine->size; rank++)
    if (awaits(&engine->peers[rank].meeting)) set |= engine->peers[rank].meeting.waiting;
  *is_circle = set & set_of(engine);
  return set | set_of(engine);
}

/* With the lock. */
static void forget_answered(struct meeting *meeting) {
  for (int kind = 0; kind < MEETING_KINDS; kind++)
    if (owes(meeting, kind)) atomic_fetch_and(&meeting->requests, ~(1u << kind));
}

static uint32_t until_of(const struct meeting *meeting) {
  uint32_t left = left_until(meeting, meeting->until);
  return left > MEETING_OPERATIONS ? total(meeting) : meeting->until;
}

/* Not with the lock: the side channel may wait for threads that want it. */
static void send_aside(struct engine *engine, struct peer *peer, uint64_t request) {
  struct meeting *meeting = &peer->meeting;
  if (!engine->side_channel) return;
  struct side_message message = {.magic = SIDE_MAGIC, .until = until_of(meeting), .request = request};
  for (int kind = 0; kind < MEETING_KINDS; kind++) message.counts[kind] = meeting->arrived[kind];
  engine->side_channel(engine->side_channel_context, peer->rank, &message, sizeof message);
  engine_lock(engine);
  count(&engine->counters.meeting_messages, 1);
  engine_unlock(engine);
}

/* Whether it has left: there may be no room in the send queue now. */
static bool send_request(struct engine *engine, struct peer *peer, uint64_t request) {
  if (!peer->usable) {
    send_aside(engine, peer, request);
    return true;
  }
  bool sent;
  engine_lock(engine);
  peer->meeting.request = request;
  int status = channel_acknowledge(peer_eager(peer), peer->ready_group, peer->ready, WIRE_MEET, &sent);
  if (status) engine_fail(engine, 0, status);
  engine_unlock(engine);
  return sent || status;
}

static void answer(struct engine *engine, struct peer *peer) {
  engine_lock(engine);
  bool aside = !peer->usable && meeting_owes_answer(peer);
  if (aside) forget_answered(&peer->meeting);
  int status = peer->usable ? peer_acknowledge(peer, true) : MLXDIST_OK;
  if (status) engine_fail(engine, 0, status);
  engine_unlock(engine);
  if (aside) send_aside(engine, peer, 0);
}

/* Counting comes before the look at the request here, and after it in the thread that takes a request: one sees the
 * other. Returns the number. */
static uint32_t arrive(struct engine *engine, struct peer *peer, atomic_uint *counter) {
  uint32_t number = atomic_fetch_add(counter, 1) + 1;
  if (meeting_owes_answer(peer)) answer(engine, peer);
  return number;
}

static uint32_t arrive_at_collective(struct engine *engine, struct peer *peer) {
  return arrive(engine, peer, &peer->meeting.arrived[MEETING_COLLECTIVES]);
}

/* Those with a handle have no order among those of other groups, so two ranks may count them differently. One that is
 * refused after this stays counted, as it does where it was handed over. */
void meeting_count(struct operation *operation) {
  const mlxdist_group *group = operation->group;
  if (is_counted) {
    is_counted = false;
    operation->lazy = true;
  } else if (operation_is_collective(operation)) {
    for (int32_t member = 0; member < group->size && operation->ordered; member++)
      if (group->lanes[member].peer) arrive_at_collective(group->engine, group->lanes[member].peer);
  } else {
    for (int i = 0; i < operation->in.count; i++) {
      struct peer *peer = operation->in.list[i].lane->peer;
      arrive(group->engine, peer, &peer->meeting.received);
    }
    for (int i = 0; i < operation->out.count; i++) {
      struct peer *peer = operation->out.list[i].lane->peer;
      arrive(group->engine, peer, &peer->meeting.arrived[MEETING_SENDS]);
    }
  }
}

void mlxdist_set_arrived(int32_t arrived) { is_counted = arrived; }

static bool is_here(const struct peer *peer, uint32_t number) {
  return wire_at_least(peer->meeting.there[partners.kind], number);
}

/* Where no queue pair joins the ranks the side channel is slow: then only after a silence. */
static bool is_due(const struct engine *engine, const struct peer *peer, uint32_t number) {
  if (engine->options.meet_after <= 0 || is_here(peer, number)) return false;
  if (!peer->usable && !engine->side_channel) return false;
  if (peer->usable && left_until(&peer->meeting, peer->meeting.until) < MEETING_OPERATIONS) return true;
  uint64_t heard = peer->meeting.heard_ns, now = partners.begun_ns;
  return !heard || (now > heard && (double)(now - heard) * 1e-9 > engine->options.meet_after);
}

static void add(const struct engine *engine, struct peer *peer, uint32_t number) {
  if (is_due(engine, peer, number)) partners.list[partners.count++] = (struct partner){.peer = peer, .number = number};
}

static struct peer *peer_of(const mlxdist_group *group, int32_t member) {
  return member >= 0 && member < group->size ? group->lanes[member].peer : 0;
}

/* Leaves in `partners` those that are to be waited for. */
int32_t mlxdist_arrive(mlxdist_group *group, int32_t to, int32_t from) {
  struct engine *engine = group->engine;
  struct peer *peer;
  partners.count = 0;
  partners.asked = 0;
  partners.begun_ns = partners.look_at_ns = clock_ns();
  partners.needed_since_ns = 0;
  partners.is_counted = false;
  partners.noticed_at = 0;
  partners.kind = from == MLXDIST_ALL ? MEETING_COLLECTIVES : MEETING_SENDS;
  for (int32_t member = 0; member < group->size && from == MLXDIST_ALL; member++) {
    if (!(peer = peer_of(group, member))) continue;
    partners.numbers[member] = arrive_at_collective(engine, peer);
    add(engine, peer, partners.numbers[member]);
  }
  if ((peer = peer_of(group, to))) arrive(engine, peer, &peer->meeting.arrived[MEETING_SENDS]);
  if ((peer = peer_of(group, from))) add(engine, peer, arrive(engine, peer, &peer->meeting.received));
  return partners.count > 0;
}

void mlxdist_go_back(mlxdist_group *group, int32_t to, int32_t from) {
  struct peer *peer;
  for (int32_t member = 0; member < group->size && from == MLXDIST_ALL; member++)
    if ((peer = peer_of(group, member))) atomic_fetch_sub(&peer->meeting.arrived[MEETING_COLLECTIVES], 1);
  if ((peer = peer_of(group, to))) atomic_fetch_sub(&peer->meeting.arrived[MEETING_SENDS], 1);
  if ((peer = peer_of(group, from))) atomic_fetch_sub(&peer->meeting.received, 1);
}

/* Those that have come leave the list. */
static void remove_present(uint64_t now) {
  int kept = 0;
  for (int i = 0; i < partners.count; i++) {
    struct peer *peer = partners.list[i].peer;
    if (!is_here(peer, partners.list[i].number)) {
      partners.list[kept++] = partners.list[i];
      continue;
    }
    peer->meeting.heard_ns = now;
    if (now - partners.begun_ns > LATE_NS) peer->meeting.until = total(&peer->meeting) + MEETING_OPERATIONS;
  }
  partners.count = kept;
}

static void request_one(struct engine *engine, struct partner *partner, uint64_t now) {
  uint64_t request = (uint64_t)partner->number << 32 | partners.asked;
  if (partners.kind == MEETING_SENDS) request |= MEETING_OF_SENDS;
  if (partner->pause_ns) request |= MEETING_REPEATS;
  if (!send_request(engine, partner->peer, request)) {
    partner->request_at_ns = now;
    return;
  }
  partner->pause_ns = !partner->pause_ns ? REPEAT_NS : 2 * partner->pause_ns;
  if (partner->pause_ns > REPEAT_MOST_NS) partner->pause_ns = REPEAT_MOST_NS;
  partner->request_at_ns = now + partner->pause_ns;
}

static void request(struct engine *engine, uint32_t set, uint64_t now) {
  bool grown = set & ~partners.asked;
  partners.asked = set;
  for (int i = 0; i < partners.count; i++)
    if (grown || now >= partners.list[i].request_at_ns) request_one(engine, &partners.list[i], now);
}

/* Whether the member has come to the operation of this meeting, so that it waits for this, or what comes after it. */
static bool is_member_here(const mlxdist_group *group, int32_t member) {
  return partners.kind == MEETING_COLLECTIVES && is_here(group->lanes[member].peer, partners.numbers[member]);
}

static bool receives_unsent(const mlxdist_group *group, const mlxdist_group *meets) {
  for (int32_t member = 0; group && member < group->size; member++) {
    const struct lane *lane = &group->lanes[member];
    if (!lane->peer || wire_at_least(lane->sent, lane->ready)) continue;
    if (group != meets || !is_member_here(meets, member)) return true;
  }
  return false;
}

/* A sender waits only where the rest is held back until this rank receives. */
static bool sends_unasked(const struct peer *peer, const mlxdist_group *meets) {
  const struct engine *engine = meets->engine;
  for (const struct arrival *arrival = peer->early; arrival; arrival = arrival->next) {
    const struct wire_descriptor *descriptor = arrival_descriptor(arrival);
    bool waits = descriptor && descriptor->bytes > stream_unasked_bytes(engine);
    bool same = arrival_header(arrival)->group == meets->id;
    if (waits && !(same && is_member_here(meets, meets->member_of[peer->rank]))) return true;
  }
  return false;
}

/* With the lock: whether an operation of another rank waits for one that has not begun here. */
static bool is_needed(const mlxdist_group *meets) {
  const struct engine *engine = meets->engine;
  for (uint32_t id = 0; id < engine->groups_room; id++) {
    const mlxdist_group *group = engine->groups[id];
    if (receives_unsent(group, meets) || (group && receives_unsent(group->hidden, meets))) return true;
  }
  for (int32_t rank = 0; rank < engine->size; rank++)
    if (sends_unasked(&engine->peers[rank], meets)) return true;
  return false;
}

static bool is_needed_for_long(const mlxdist_group *meets, uint64_t now) {
  if (now < partners.look_at_ns) return false;
  partners.look_at_ns = now + LOOK_NS;
  if (!is_needed(meets))
    partners.needed_since_ns = 0;
  else if (!partners.needed_since_ns)
    partners.needed_since_ns = now;
  return partners.needed_since_ns && now - partners.needed_since_ns > MEETING_NEEDED_NS;
}

/* With the lock. Fails the group where a peer is missing for too long: the operation that is handed over next ends with
 * that. */
static bool is_over(mlxdist_group *group, const char *operation, uint64_t now, uint32_t *set) {
  struct engine *engine = group->engine;
  const struct peer *missing = partners.list[0].peer;
  bool is_circle;
  *set = waiting_set(engine, &is_circle);
  if (is_circle || is_needed_for_long(group, now)) {
    debug(DEBUG_INFO, "meeting", "rank %d hands %s over before rank %d has come to it: %s", engine->rank, operation,
          missing->rank, is_circle ? "ranks wait in a circle" : "another rank waits for an operation of this one");
    return true;
  }
  int status =
      deadline_meet(engine, operation, missing->rank, (double)(now - partners.begun_ns) * 1e-9, &partners.noticed_at);
  if (status) engine_fail(engine, 0, status);
  return status;
}

int32_t mlxdist_meet(mlxdist_group *group, const char *operation, double patience) {
  struct engine *engine = group->engine;
  struct waiting wait = {0};
  uint64_t now = clock_ns();
  engine_lock(engine);
  count(&engine->counters.meetings, !partners.is_counted);
  engine_unlock(engine);
  partners.is_counted = true;
  while (remove_present(now), partners.count > 0) {
    uint32_t set;
    if (patience >= 0 && (double)(now - partners.begun_ns) * 1e-9 > patience) return 0;
    if (failure_check(&engine->failure)) break;
    engine_lock(engine);
    bool over = is_over(group, operation, now, &set);
    engine_unlock(engine);
    if (over) break;
    request(engine, set, now);
    engine_lock(engine);
    engine_wait(engine, &wait);
    engine_unlock(engine);
    now = clock_ns();
  }
  return 1;
}

void meeting_heard(const struct operation *operation, uint64_t now) {
  /* None of these ends before all members have come to it, whichever the messages went by. */
  const uint32_t joint = 1u << WIRE_ALL_REDUCE | 1u << WIRE_ALL_GATHER | 1u << WIRE_REDUCE_SCATTER |
                         1u << WIRE_BARRIER | 1u << WIRE_ALL_TO_ALL;
  const mlxdist_group *group = operation->group;
  if (joint >> operation->sends.operation & 1) {
    for (int32_t member = 0; member < group->size; member++)
      if (group->lanes[member].peer) group->lanes[member].peer->meeting.heard_ns = now;
    return;
  }
  for (int i = 0; i < operation->in.count; i++) operation->in.list[i].lane->peer->meeting.heard_ns = now;
}

/* With the lock. */
static void take(struct meeting *meeting, const uint32_t *counts, uint32_t until) {
  for (int kind = 0; kind < MEETING_KINDS; kind++)
    if (wire_at_least(counts[kind], meeting->there[kind])) meeting->there[kind] = counts[kind];
  uint32_t left = left_until(meeting, until), own = left_until(meeting, meeting->until);
  if (left <= 2 * MEETING_OPERATIONS && (own > 2 * MEETING_OPERATIONS || left > own)) meeting->until = until;
}

/* With the lock. The lower one of two requests stays: the other is repeated. */
static void take_request(struct meeting *meeting, uint64_t request) {
  uint32_t number = (uint32_t)(request >> 32);
  int kind = request & MEETING_OF_SENDS ? MEETING_SENDS : MEETING_COLLECTIVES;
  if (!(request & MEETING_REPEATS) && wire_at_least(meeting->announced[kind], number)) return;
  meeting->waiting = request & ((1u << MEETING_SET_BITS) - 1);
  bool is_lower = !(meeting->requests >> kind & 1) || wire_at_least(meeting->requested[kind], number);
  if (is_lower) meeting->requested[kind] = number;
  atomic_fetch_or(&meeting->requests, 1u << kind);
}

void meeting_read(struct peer *peer, const struct wire_header *header) {
  const uint32_t counts[MEETING_KINDS] = {header->sequence, header->order};
  take(&peer->meeting, counts, header->stream);
  if (header->flags & WIRE_MEET) take_request(&peer->meeting, header->offset);
}

void meeting_write(struct peer *peer, struct wire_header *header) {
  struct meeting *meeting = &peer->meeting;
  bool requests = header->flags & WIRE_MEET, answers = meeting_owes_answer(peer);
  forget_answered(meeting);
  for (int kind = 0; kind < MEETING_KINDS; kind++) meeting->announced[kind] = meeting->arrived[kind];
  header->sequence = meeting->announced[MEETING_COLLECTIVES];
  header->order = meeting->announced[MEETING_SENDS];
  header->stream = until_of(meeting);
  if (requests) header->offset = meeting->request;
  if (requests || answers) count(&peer->channels[0].engine->counters.meeting_messages, 1);
}

bool meeting_take(struct engine *engine, struct peer *peer, const void *bytes, uint64_t length) {
  struct side_message message;
  if (length != sizeof message) return false;
  memcpy(&message, bytes, sizeof message);
  if (message.magic != SIDE_MAGIC) return false;
  engine_lock(engine);
  take(&peer->meeting, message.counts, message.until);
  if (message.request) take_request(&peer->meeting, message.request | MEETING_REPEATS);
  engine_unlock(engine);
  if (meeting_owes_answer(peer)) answer(engine, peer);
  return true;
}

void mlxdist_expect_late(mlxdist_group *group) {
  for (int32_t member = 0; member < group->size; member++) {
    struct peer *peer = group->lanes[member].peer;
    if (peer) peer->meeting.until = total(&peer->meeting) + MEETING_OPERATIONS;
  }
}
