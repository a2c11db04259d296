/* tests/native/fake_verbs/fake_verbs.h: how a test makes the fake libibverbs misbehave.

   The fake has two devices, fake0 and fake1, with an active RoCE port each, on one network. Queue
   pairs of one process reach each other: what is posted is carried out at once, on the thread that
   posts it, with the checks of keys, ranges, rights, receives and queue lengths that a device
   makes. What cannot be delivered stays posted, unanswered, until something changes or the queue
   pair fails; nothing times out by itself. It proves how errors are handled, never that verbs work.

   JAXRDMA_IBVERBS_LIB names it; a test finds these functions by dlsym. All are safe on any thread.
   A call that a real device or library would punish by a hang or by lost completions is a misuse,
   counted and named by fake_verbs_misuse. */
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

/// What can be told to fail.
enum class FakeVerbsCall : int {
  kOpenDevice,
  kQueryDevice,
  kQueryPort,
  kAllocPd,
  kRegMr,
  kCreateCompChannel,
  kCreateCq,
  kCreateQp,
  kModifyInit,
  kModifyRtr,
  kModifyRts,
  kPostSend,
  kPostRecv,
};

/// Objects that are not destroyed yet.
struct FakeVerbsAlive {
  uint32_t contexts, pds, regions, channels, cqs, qps;
};

extern "C" {
/// Both devices as at the beginning, no faults; forgets misuses. Objects stay as they are.
void fake_verbs_reset(void);

/// `call` on `device` (null: on any) fails with `error`, `count` times, after `skip` times that it
/// does not.
void fake_verbs_fail(FakeVerbsCall call, const char* device, uint32_t skip, uint32_t count,
                     int error);

/// Transitions to RTR block until this is called with false; `fake_verbs_stalled` of them do now.
void fake_verbs_stall_rtr(bool stall);
uint32_t fake_verbs_stalled(void);

/// After `skip` more, the next work request of queue pair `qp` completes with `status`, and the
/// queue pair fails. `delivered`: the peer gets what it carries nevertheless, as when only the
/// acknowledgement is lost.
void fake_verbs_complete(uint32_t qp, ibv_wc_status status, uint32_t skip, bool delivered);
/// After `skip` more, the next work request of queue pair `qp` is delivered twice, as Soft-RoCE may
/// do with one that it repeats.
void fake_verbs_repeat(uint32_t qp, uint32_t skip);
/// The first posted receive of `qp` completes with `status`, and the queue pair fails.
void fake_verbs_complete_receive(uint32_t qp, ibv_wc_status status);

/// While held, what is posted to `qp` stays unanswered.
void fake_verbs_hold(uint32_t qp, bool held);

/// While slow, what is posted to `qp` does not come back when it fails.
void fake_verbs_slow_flush(uint32_t qp, bool slow);

/// An asynchronous event, with what it says. Of `qp`: QP_FATAL and the like fail it, too badly to
/// flush what is posted; CQ_ERR stops its completion queue. With `qp` 0, of `device`: PORT_ERR and
/// PORT_ACTIVE change the port; DEVICE_FATAL removes the device: calls fail, what is posted is
/// never answered nor flushed.
void fake_verbs_raise(const char* device, ibv_event_type event, uint32_t qp);

/// Gives an IPv4 address to GIDs 0 (RoCE v1) and 1 (RoCE v2), without an event.
void fake_verbs_set_address(const char* device, uint32_t address);

FakeVerbsAlive fake_verbs_alive(void);
/// The first misuse since the last reset; empty if none.
const char* fake_verbs_misuse(void);
}
