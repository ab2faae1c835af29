/*
 * Connections between hosts: the second wire of the software provider, below the same verbs.
 *
 * Each queue pair in RTS has a TCP connection of its own to its peer's listener, for what it sends; what it receives
 * comes over the connection that its peer has made. So a stopped peer delays no other one. A connection
 * begins with a handshake (tcp_handshake.c) and is then a stream of messages, each a struct tcp_header and its payload.
 *
 * There is no thread. poll_cq looks at the sockets, once a call, and post_send writes. The receiver plays the network
 * adapter for itself: it reads into the posted receive and takes that by `claim`, as a peer in shared memory does, when
 * the message is whole. So a message that breaks off leaves its receive posted, and all rules of queue_pair.c hold.
 *
 * It stays an unreliable connection. A SEND completes when its last byte is with the system. When a connection breaks,
 * what was on its way is lost without a word; so are SENDs while it cannot be re-created, which is tried for as long as
 * the queue pair lives. That is also what a peer with another key, or that plays another device, looks like: connecting
 * goes on after RTR, too late for an error. Devices with credit (device_profile.h) wait instead; as the system's
 * buffers take part of what waits, a SEND may complete before its receive is posted.
 */
#pragma once

#include "siphash.h"
#include "soft.h"

#include <netinet/in.h>
#include <poll.h>

/* Connections that peers have made, the unfinished ones included: half are for those that have not proven the key. */
#define TCP_MAX_RECEIVERS (4 * SOFT_MAX_QP)
/* As many as peers can need at the same time, or they would be in each other's way. */
#define TCP_MAX_STRANGERS (2 * SOFT_MAX_QP)
#define TCP_HANDSHAKE_NS UINT64_C(5000000000)

#define TCP_NONCE_BYTES 16

/* On the wire all numbers are in network order. First the listener sends a nonce; then its peer this, where `proof`
 * covers the nonce and all before it; then the listener a proof of its own. */
struct tcp_greeting {
  uint8_t magic[8];
  uint8_t nonce[TCP_NONCE_BYTES];
  uint8_t gid[16];  /* the address that the sender has chosen for itself, */
  uint32_t port;    /* and the port where it listens: both name its context */
  uint32_t profile; /* enum soft_profiles */
  uint32_t to_qp, from_qp, psn;
  uint8_t proof[SIPHASH_BYTES];
};
_Static_assert(sizeof(struct tcp_greeting) == 76, "as it is on the wire");

/* Before each message. */
struct tcp_header {
  uint32_t kind; /* enum tcp_kind */
  uint32_t length;
  uint32_t imm_data; /* as the user gave it */
  uint32_t rkey;     /* of RDMA_WRITE, */
  uint32_t addr[2];  /* high and low half */
};
_Static_assert(sizeof(struct tcp_header) == 24, "as it is on the wire");
enum tcp_kind { TCP_SEND = 1, TCP_SEND_WITH_IMM, TCP_WRITE, TCP_WRITE_WITH_IMM, TCP_SEND_IN_PART };

static inline bool tcp_is_write(uint32_t kind) { return kind == TCP_WRITE || kind == TCP_WRITE_WITH_IMM; }

static inline bool tcp_has_imm(uint32_t kind) { return kind == TCP_SEND_WITH_IMM || kind == TCP_WRITE_WITH_IMM; }

enum tcp_state {
  TCP_WAITING, /* until it tries to connect again */
  TCP_CONNECTING,
  TCP_CHALLENGED, /* waits for the nonce of the listener, */
  TCP_GREETED,    /* and for its proof */
  TCP_OPEN,
};

/* The connection that a queue pair makes. */
struct tcp_sender {
  enum tcp_state state;
  int fd;
  uint64_t until_ns; /* WAITING: of the next attempt; the handshake must be done; OPEN: since when */
  uint64_t pause_ns; /* before the next attempt */
  int error;         /* errno of the last attempt; 0 if it went well */
  struct sockaddr_in from, to;
  struct tcp_greeting greeting;
  uint8_t heard[TCP_NONCE_BYTES]; /* nonce or proof, as far as it has come */
  unsigned heard_bytes;
  uint8_t challenge[TCP_NONCE_BYTES];
  bool writable; /* the system takes bytes, as far as is known */

  /* The first SEND that has not left, if it has begun. */
  bool begun;
  unsigned copies; /* still to be written: 2 if it is to be duplicated, 0 if it is lost */
  struct tcp_header header;
  uint32_t length;    /* of its payload */
  uint64_t written;   /* of header and payload */
  uint64_t wrong;     /* the byte of the payload that a fault has changed, or UINT64_MAX, */
  uint8_t wrong_byte; /* and into what */
};

/* A connection that a peer has made. Between messages bytes are read ahead, so that small ones cost one call. */
struct tcp_receiver {
  struct tcp_receiver* next;
  int fd;            /* -1: closed, and to be freed */
  bool open;         /* the peer has proven that it knows the key */
  bool paused;       /* the next message waits for a receive */
  uint64_t until_ns; /* the handshake must be done */
  uint8_t challenge[TCP_NONCE_BYTES];
  struct tcp_greeting greeting;
  unsigned start, end; /* of what was read ahead */
  uint8_t buffer[8192];

  /* The message that is being read. */
  struct tcp_header header;
  uint64_t left;      /* of its payload */
  char* to;           /* where the rest goes; NULL: nowhere */
  struct soft_qp* qp; /* that receives it, or NULL */
};

/* What a context has that knows a key. */
struct soft_tcp {
  uint8_t key[SIPHASH_BYTES];
  int listener;
  in_port_t port; /* in network order */
  struct tcp_receiver* receivers;
  uint32_t turns;
  struct pollfd sockets[1 + TCP_MAX_RECEIVERS + SOFT_MAX_QP];
};

_Static_assert(SIPHASH_BYTES == VERBS_KEY_BYTES, "the key is SipHash's");

/* What the rest of the provider calls. errno values. */
int soft_tcp_set_key(struct ibv_context* context, const uint8_t key[VERBS_KEY_BYTES]);
void soft_tcp_close(struct soft_context* context);
void soft_tcp_progress(struct soft_context* context);
/* At RTR: EINVAL without a key, or if the peer's address is none. */
int soft_tcp_address(struct soft_qp* qp, const struct ibv_ah_attr* ah);
void soft_tcp_start(struct soft_qp* qp);     /* at RTS */
void soft_tcp_stop(struct soft_qp* qp);      /* closes both connections */
void soft_tcp_forget(struct soft_qp* qp);    /* gives up what soft_tcp_address has made */
int soft_tcp_error(const struct ibv_qp* qp); /* connect_error of the table */
