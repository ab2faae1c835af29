#include "meeting_wait.h"

#include "abort.h"
#include "acknowledgement.h"
#include "deadline.h"
#include "debug.h"
#include "label.h"
#include "progress.h"
#include "steady_clock.h"
#include "timers.h"

#include <string.h>

/* A request without an answer is retransmitted after this time, since acknowledgements may be lost, then after twice
 * the time and so on: a peer that is stopped has few receives for them. */
#define REQUEST_MIN_NS 40000000u
#define REQUEST_MAX_NS 1000000000u

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
  struct partner list[MLXDIST_MAX_RANKS];
  enum meeting_kind kind;
  uint32_t numbers[MLXDIST_MAX_RANKS]; /* of a collective, for each member */
  uint32_t asked;                      /* the set of the last requests */
  uint64_t begun_ns, look_at_ns, needed_since_ns;
  bool is_counted;
  double stall_warned_at;
};

static _Thread_local struct partners partners;

static uint32_t set_of(const struct engine *engine) { return 1u << engine->rank % MEETING_SET_BITS; }

/* Whether the peer waits for something that this rank has not come to. */
static bool awaits(const struct meeting *meeting) {
  for (int kind = 0; kind < MEETING_KINDS; kind++)
    if (meeting->requests >> kind & 1 && !meeting_owes(meeting, kind)) return true;
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

/* Not with the lock: the side channel may wait for threads that want it. */
static void send_aside(struct engine *engine, struct peer *peer, uint64_t request) {
  struct meeting *meeting = &peer->meeting;
  if (!engine->side_channel) return;
  struct side_message message = {.magic = SIDE_MAGIC, .until = meeting_until(meeting), .request = request};
  for (int kind = 0; kind < MEETING_KINDS; kind++) message.counts[kind] = meeting->arrived[kind];
  engine->side_channel(engine->side_channel_context, peer->endpoint.rank, &message, sizeof message);
  engine_lock(engine);
  meeting_count_message(engine);
  engine_unlock(engine);
}

/* Whether it has left: there may be no room in the send queue now. */
static bool send_request(struct engine *engine, struct peer *peer, uint64_t request) {
  if (!peer->endpoint.usable) {
    send_aside(engine, peer, request);
    return true;
  }
  bool sent;
  engine_lock(engine);
  peer->meeting.request = request;
  int status = acknowledgement_send(endpoint_eager(&peer->endpoint), WIRE_MEET, &sent);
  if (status) engine_fail(engine, 0, status);
  engine_unlock(engine);
  return sent || status;
}

static void respond(struct engine *engine, struct peer *peer) {
  engine_lock(engine);
  bool aside = !peer->endpoint.usable && meeting_owes_response(&peer->meeting);
  if (aside) meeting_forget_answered(&peer->meeting);
  int status = MLXDIST_OK;
  if (peer->endpoint.usable) {
    peer->endpoint.ack_requested = true;
    status = endpoint_flush(&peer->endpoint, true);
  }
  if (status) engine_fail(engine, 0, status);
  engine_unlock(engine);
  if (aside) send_aside(engine, peer, 0);
}

/* Counting comes before the look at the request here, and after it in the thread that takes a request: one sees the
 * other. Returns the number. */
static inline uint32_t arrive(struct engine *engine, struct peer *peer, atomic_uint *counter) {
  uint32_t number = atomic_fetch_add(counter, 1) + 1;
  if (meeting_owes_response(&peer->meeting)) respond(engine, peer);
  return number;
}

static inline uint32_t arrive_at_collective(struct engine *engine, struct peer *peer) {
  return arrive(engine, peer, &peer->meeting.arrived[MEETING_COLLECTIVES]);
}

/* Those with a handle have no order among those of other groups, so two ranks may count them differently. One that is
 * refused after this stays counted, as it does where it was handed over. */
void meeting_count(struct operation *operation) {
  const mlxdist_group *group = operation->group;
  bool ordered = !operation->handled && !(group->id & GROUP_INTERNAL);
  if (operation->lazy) return;
  if (operation_is_collective(operation)) {
    for (int32_t member = 0; member < group->size && ordered; member++)
      if (group->peers[member].peer) arrive_at_collective(group->engine, group->peers[member].peer);
  } else {
    for (int i = 0; i < operation->in.count; i++) {
      struct peer *peer = operation->in.list[i].group_peer->peer;
      arrive(group->engine, peer, &peer->meeting.received);
    }
    for (int i = 0; i < operation->out.count; i++) {
      struct peer *peer = operation->out.list[i].group_peer->peer;
      arrive(group->engine, peer, &peer->meeting.arrived[MEETING_SENDS]);
    }
  }
}

static bool is_here(const struct peer *peer, uint32_t number) {
  return wire_at_least(peer->meeting.there[partners.kind], number);
}

/* Where no queue pair joins the ranks the side channel is slow: then only after a silence. */
static bool is_due(const struct engine *engine, const struct peer *peer, uint32_t number) {
  if (engine->options.meet_after <= 0 || is_here(peer, number)) return false;
  if (!peer->endpoint.usable && !engine->side_channel) return false;
  if (peer->endpoint.usable && meeting_left(&peer->meeting, peer->meeting.until) < MEETING_OPERATIONS) return true;
  uint64_t heard = peer->meeting.heard_ns, now = partners.begun_ns;
  return !heard || (now > heard && (double)(now - heard) * 1e-9 > engine->options.meet_after);
}

static void add(const struct engine *engine, struct peer *peer, uint32_t number) {
  if (is_due(engine, peer, number)) partners.list[partners.count++] = (struct partner){.peer = peer, .number = number};
}

static struct peer *member_peer(const mlxdist_group *group, int32_t member) {
  return member >= 0 && member < group->size ? group->peers[member].peer : 0;
}

static void take_places(mlxdist_group *group, mlxdist_call *call, int32_t to, int32_t from) {
  bool sends = to >= 0 && to < group->size, receives = from >= 0 && from < group->size;
  call->enqueued = 1;
  call->place = from == MLXDIST_ALL ? places_take(&group->collectives) : 0;
  call->label = label_of_call(group, call->label, call->place);
  call->send = sends ? places_take(&group->peers[to].sends) : 0;
  call->receive = receives ? places_take(&group->peers[from].receives) : 0;
}

/* Leaves in `partners` those that are to be waited for. */
int32_t mlxdist_enqueue(mlxdist_group *group, mlxdist_call *call, int32_t to, int32_t from) {
  struct engine *engine = group->engine;
  struct peer *peer;
  take_places(group, call, to, from);
  partners.count = 0;
  partners.asked = 0;
  partners.begun_ns = partners.look_at_ns = clock_ns();
  partners.needed_since_ns = 0;
  partners.is_counted = false;
  partners.stall_warned_at = 0;
  partners.kind = from == MLXDIST_ALL ? MEETING_COLLECTIVES : MEETING_SENDS;
  for (int32_t member = 0; member < group->size && from == MLXDIST_ALL; member++) {
    if (!(peer = member_peer(group, member))) continue;
    partners.numbers[member] = arrive_at_collective(engine, peer);
    add(engine, peer, partners.numbers[member]);
  }
  if ((peer = member_peer(group, to))) arrive(engine, peer, &peer->meeting.arrived[MEETING_SENDS]);
  if ((peer = member_peer(group, from))) add(engine, peer, arrive(engine, peer, &peer->meeting.received));
  return partners.count > 0;
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
    if (now - partners.begun_ns > LATE_NS) peer->meeting.until = meeting_total(&peer->meeting) + MEETING_OPERATIONS;
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
  partner->pause_ns = !partner->pause_ns ? REQUEST_MIN_NS : 2 * partner->pause_ns;
  if (partner->pause_ns > REQUEST_MAX_NS) partner->pause_ns = REQUEST_MAX_NS;
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
  return partners.kind == MEETING_COLLECTIVES && is_here(group->peers[member].peer, partners.numbers[member]);
}

static bool receives_unsent(const struct peer *peer, const mlxdist_group *meets) {
  for (uint32_t i = 0; i < peer->early_count; i++) {
    bool same = peer->early_cts[i].group == meets->id;
    if (!same || !is_member_here(meets, meets->member_of[peer->endpoint.rank])) return true;
  }
  return false;
}

/* A sender waits only where the rest is held back until this rank receives. */
static bool sends_unasked(const struct peer *peer, const mlxdist_group *meets) {
  const struct engine *engine = meets->engine;
  for (const struct recv_desc *desc = peer->unexpected; desc; desc = desc->next) {
    const struct wire_descriptor *descriptor = recv_descriptor(desc);
    bool waits = descriptor && descriptor->bytes > transfer_eager_limit(engine);
    bool same = recv_header(desc)->group == meets->id;
    if (waits && !(same && is_member_here(meets, meets->member_of[peer->endpoint.rank]))) return true;
  }
  return false;
}

/* With the lock: whether an operation of another rank waits for one that has not begun here. */
static bool is_needed(const mlxdist_group *meets) {
  const struct engine *engine = meets->engine;
  for (int32_t rank = 0; rank < engine->size; rank++)
    if (receives_unsent(&engine->peers[rank], meets) || sends_unasked(&engine->peers[rank], meets)) return true;
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
          missing->endpoint.rank,
          is_circle ? "ranks wait in a circle" : "another rank waits for an operation of this one");
    return true;
  }
  int status = deadline_meet(engine, operation, missing->endpoint.rank, (double)(now - partners.begun_ns) * 1e-9,
                             &partners.stall_warned_at);
  if (status) engine_fail(engine, 0, status);
  return status;
}

int32_t mlxdist_meet(mlxdist_group *group, const char *operation, double patience) {
  struct engine *engine = group->engine;
  struct backoff backoff = {0};
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
    engine_wait(engine, &backoff);
    engine_unlock(engine);
    now = clock_ns();
  }
  return 1;
}

bool meeting_receive(struct engine *engine, struct peer *peer, const void *bytes, uint64_t length) {
  struct side_message message;
  if (length != sizeof message) return false;
  memcpy(&message, bytes, sizeof message);
  if (message.magic != SIDE_MAGIC) return false;
  engine_lock(engine);
  meeting_take_counts(&peer->meeting, message.counts, message.until);
  if (message.request) meeting_take_request(&peer->meeting, message.request | MEETING_REPEATS);
  engine_unlock(engine);
  if (meeting_owes_response(&peer->meeting)) respond(engine, peer);
  return true;
}

void mlxdist_expect_late(mlxdist_group *group) {
  for (int32_t member = 0; member < group->size; member++) {
    struct peer *peer = group->peers[member].peer;
    if (peer) peer->meeting.until = meeting_total(&peer->meeting) + MEETING_OPERATIONS;
  }
}
