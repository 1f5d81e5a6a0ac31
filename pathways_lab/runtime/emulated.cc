// Holds a CPU device for a given time without using a core.
//
// Arguments: one buffer, which is handed on unchanged (so that what follows
// really waits), the time in milliseconds, the number of elements that it is
// for (0: for whatever comes), and the lane in whose queue the device is (-1: in
// none).  XLA runs the call on a thread of its own, without Python's lock; two of
// them on two devices overlap.
//
// A sleep ends late, and the next one begins later still; a device has no such
// gaps.  So each device of a lane has a clock of its own: what was in its queue
// before its last computation ended begins when that one ended, and what begins
// later begins when it does.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Clock = std::chrono::steady_clock;

// Times are nanoseconds of the steady clock.
constexpr int64_t kNanoseconds = 1000000;  // in a millisecond
// A computation that begins so much too late was kept by something else than a sleep.
constexpr int64_t kForgiven = 5 * kNanoseconds;
// More than may be in flight on one lane.
constexpr uint64_t kLaunches = 64;

struct Device {
  int64_t run = 0;
  uint64_t begun = 0;
  int64_t free = 0;
};

struct Lane {
  uint64_t launched = 0;
  int64_t launches[kLaunches] = {};
  std::map<int32_t, Device> devices;
};

static std::mutex mutex;
static std::map<int64_t, Lane> lanes;

static int64_t Now() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

extern "C" {

// A computation that holds its devices was launched on a lane.
void PathwaysLabLaunchedAt(int64_t lane, int64_t now) {
  std::lock_guard<std::mutex> lock(mutex);
  Lane& queue = lanes[lane];
  queue.launches[queue.launched++ % kLaunches] = now;
}

void PathwaysLabLaunched(int64_t lane) { PathwaysLabLaunchedAt(lane, Now()); }

// When a device of a lane is free again that a computation, its *run*, comes to hold *now*.
int64_t PathwaysLabUntil(int64_t lane, int32_t number, int64_t run, int64_t now,
                         int64_t length) {
  std::lock_guard<std::mutex> lock(mutex);
  Lane& queue = lanes[lane];
  Device& device = queue.devices[number];
  // After another hold of the same computation there is nothing to wait for.
  bool queued = device.run == run;
  if (!queued) {
    const uint64_t own = device.begun++;
    queued = own < queue.launched && queue.launched - own <= kLaunches &&
             queue.launches[own % kLaunches] <= device.free;
    device.run = run;
  }
  const bool at_once = queued && now - device.free < kForgiven;
  device.free = (at_once ? device.free : std::max(now, device.free)) + length;
  return device.free;
}

}  // extern "C"

static ffi::Error Hold(ffi::RunId run, int32_t device, double milliseconds,
                       double elements, int64_t lane, ffi::AnyBuffer in,
                       ffi::Result<ffi::AnyBuffer> out) {
  if (elements > 0) {
    milliseconds *= static_cast<double>(in.element_count()) / elements;
  }
#ifdef __linux__
  // Else the kernel lets sleepers of this thread lie for 50 us more.
  prctl(PR_SET_TIMERSLACK, 1);
#endif
  const int64_t now = Now(), length = static_cast<int64_t>(milliseconds * kNanoseconds);
  const int64_t until =
      lane < 0 ? now + length
               : PathwaysLabUntil(lane, device, run.run_id, now, length);
  std::this_thread::sleep_until(Clock::time_point(std::chrono::duration_cast<Clock::duration>(
      std::chrono::nanoseconds(until))));
  // The two are one buffer where XLA kept the aliasing that was asked for.
  if (out->untyped_data() != in.untyped_data()) {
    std::memcpy(out->untyped_data(), in.untyped_data(), in.size_bytes());
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PathwaysLabHold, Hold,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attr<double>("ms")
                                  .Attr<double>("elements")
                                  .Attr<int64_t>("lane")
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
