// The interpreter of one rank: issues instructions for all ranks, and runs those that arrive.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "smp/pipeline/frame.h"
#include "smp/pipeline/gradient_sums.h"
#include "smp/pipeline/host.h"
#include "smp/pipeline/instruction.h"
#include "smp/pipeline/lanes.h"
#include "smp/pipeline/live_microbatches.h"
#include "smp/pipeline/remote_tensor.h"
#include "smp/pipeline/status.h"
#include "smp/pipeline/value_table.h"
#include "smp/random.h"
#include "smp/transport.h"

namespace smp::pipeline {

/// Home of a module without parameters that nobody placed: it runs where the largest of its tensors lies.
inline constexpr int kFollowsData = -1;

struct ModuleInfo {
  std::string name;
  int home = 0;
  bool container = false;
  bool dynamic = false;         // what it gives back is not known from its arguments' shapes: asked each time
  bool ordered = false;         // has buffers, its own or below: its calls keep the order of microbatches
  std::vector<int> parameters;  // of its subtree, by index
};

struct ParameterInfo {
  std::string name;
  at::Tensor tensor;
  int home = 0;
};

struct EngineOptions {
  Policy policy = Policy::kInterleaved;
  int active_microbatches = 1;
  double stall_timeout_s = 300;  // 0: never
  bool rng_by_module = false;    // random numbers that are the same for every layout
  std::vector<int> peers;        // transport rank of each partition; its size is the number of partitions
  std::vector<ModuleInfo> modules;
  std::vector<ParameterInfo> parameters;
  std::vector<int> shared;  // parameters that several modules have
  std::uint32_t generation =
      0;  // of the model: late messages of an earlier engine on this transport are not for this one
  std::function<void()> after_look;  // for tests: called after each look at whether the step has failed, without a lock
};

/// What a call gives back, as its owner reports it and its issuer remembers it.
struct CallReport {
  std::string tree;
  std::vector<TensorMeta> outputs;
  std::vector<std::int32_t> same_as;  // for each output: the input that it is, or -1
  std::vector<std::int32_t>
      shares;  // an output, and the input or (counted after those) output whose memory it shares; ...
  std::vector<std::int32_t> changed;  // inputs that the call changed in place: each is one more output of its node
  std::vector<TensorMeta> changed_metas;
  std::vector<std::uint8_t> reach;  // [edge of node][input]: can a gradient get there

  [[nodiscard]] std::string encode() const;  // all but reach
  static CallReport decode(Reader& reader);
};

struct CallOutcome {
  std::string tree;
  std::vector<at::Tensor> outputs;
};

/// Counts since the engine was made, for traces and tests.
struct EngineCounts {
  std::map<std::string, std::int64_t> executed;  // by name of instruction
  std::int64_t issued = 0;
  std::int64_t moved_bytes = 0;  // values that left this rank
  std::int64_t moved_values = 0;
  std::int64_t waits = 0;  // for what is not known yet, or data
  std::int64_t asked = 0;  // what came out of a call or an operator, since that was not known
  std::int64_t gradient_contributions = 0;
  std::size_t peak_microbatches = 0;  // with graphs on this rank at once
};

struct EngineState {
  std::size_t values = 0;
  std::size_t calls = 0;
  std::int64_t value_bytes = 0;
  std::size_t queued = 0;
  std::size_t frames = 0;
  std::int64_t pending_gradient_bytes = 0;  // contributions that are not in .grad yet
  std::size_t replies = 0;                  // that nobody has taken
  std::size_t announcements = 0;            // begins and ends of steps that nobody has taken
  int open_microbatches = 0;
};

/// One for each rank. Threads: the issuing thread is the caller's; one executor (a second takes over only while one
/// waits) and the transport's thread. All functions may block only where they say so. None is collective unless it says
/// so.
class Engine {
 public:
  Engine(std::shared_ptr<Transport> transport, std::shared_ptr<Host> host, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] int partition() const { return partition_; }
  [[nodiscard]] int partitions() const { return static_cast<int>(options_.peers.size()); }
  /// The step that this rank is in, or was in last; they count from 1.
  [[nodiscard]] std::uint32_t step() const;

  // ---- a step; partition 0 drives, the others follow. Errors of any rank leave these as Host::throw_aborted() says.

  /// Partition 0: starts a step that all ranks know as `name`.
  void begin_step(const std::string& name);
  /// Partition 0: opens the frame of a microbatch and makes it this thread's. Blocks while `active_microbatches` are
  /// unfinished.
  void begin_microbatch(std::int32_t microbatch);
  /// Partition 0: all was issued. Does not block.
  void end_microbatch();
  /// Leaves a step that failed, and with it the frame of a microbatch. Blocks until nothing of the step runs on this
  /// rank: then its parameters and their gradients are the caller's again. After a stall it does not wait for long.
  void leave_failed_step();
  /// Partition 0: blocks until every microbatch is finished on every rank and gradients are complete.
  void finish_microbatches();
  /// Partition 0: gives `outputs` to all ranks, which then leave the step.
  void end_step(const std::string& outputs);
  /// Other partitions: runs the step until partition 0 ends it; returns its outputs. Blocks. Throws UsageError, on all
  /// ranks, when partition 0 runs another step than `name`.
  std::string follow_step(const std::string& name);

  /// Ends the step on all ranks; the first failure wins. Any thread.
  void abort(Failure failure);
  /// The failure that ended the last step, if one did.
  [[nodiscard]] std::optional<Failure> failure() const;

  /// See ModuleInfo::dynamic. Not collective, but every rank must say the same.
  void set_dynamic(std::int32_t module, bool dynamic);

  /// Tells the others that this rank leaves, and stops. Blocks until its threads have ended. Idempotent.
  void close();

  // ---- issuing: from a thread with a current frame

  /// Calls a module at its home. Blocks only when it does not know yet what comes out.
  CallOutcome call(std::int32_t module, const std::string& tree, const std::vector<at::Tensor>& tensors,
                   const std::string& training);
  /// `x` as a remote tensor at `home`, by a differentiable move. Does not block.
  at::Tensor to_home(const at::Tensor& x, int home, bool remember = true);
  /// `x` as a tensor of this process, differentiable. Blocks.
  at::Tensor to_local(const at::Tensor& x);
  /// The data of `x`, without autograd. Blocks.
  at::Tensor fetch(const at::Tensor& x);
  /// fetch() in two halves: the first asks for the data and does not block, the second, which needs no frame, waits for
  /// it.
  ValueId begin_fetch(const at::Tensor& x);
  at::Tensor end_fetch(ValueId arrival);
  /// Sends one instruction to a partition; `key` is that of the random numbers that it draws. Does not block.
  void issue(int home, Body body, std::uint64_t key = 0);
  /// Blocks until the reply named `id` came.
  std::string wait_reply(ValueId id);

  /// Sees to it that gradients of this rank's parameters that come as remote tensors are added up where they belong; to
  /// be called before each backward, since hooks that the user sets meanwhile take the place of ours. Does not block.
  void watch_gradients();
  /// Adds what came for a parameter of this rank to its gradient, in the order of microbatches. Does not block.
  void accumulate(int parameter, const at::Tensor& gradient, std::int64_t pass);

  ValueId new_ids(std::int64_t count = 1);
  at::Tensor new_remote(int home, ValueId id, const TensorMeta& meta);
  Handle new_handle(int home, ValueId id);
  /// Partition that operators on these tensors run on: a parameter's home, else where most bytes lie.
  [[nodiscard]] int common_home(const std::vector<at::Tensor>& tensors) const;
  /// The home of a registered parameter, else this partition.
  [[nodiscard]] int home_of(const at::Tensor& x) const;
  /// Throws UsageError when one of the tensors is a parameter in the subtree of a module.
  void check_not_used(const std::vector<at::Tensor>& tensors, std::int32_t module) const;

  // ---- looking at it

  EngineCounts counts() const;
  EngineState state() const;
  /// What has not finished, and what it waits for.
  RankStatus status() const;

 private:
  /// What must not be destroyed under the lock: the end of a tensor may need the interpreter's lock, which another
  /// thread may hold while it waits for ours. Declared before the lock, so that it goes after it.
  struct Leftovers {
    ValueTable::Trash values;
    std::vector<std::shared_ptr<Frame>> frames;
    std::shared_ptr<ReleaseQueue> releases;
  };

  // engine.cpp: steps and failures
  void enter_step(const std::string& name);
  void leave_step();
  void give_random_back();
  std::string follow(const std::string& name);
  void wait(const std::function<bool()>& ready);
  std::uint32_t own_step() const;
  void check_failed() const;
  Failure failure_of(std::uint32_t step) const;
  /// The lock of the tables, for what belongs to a step. Throws as check_failed() does when that step has failed: the
  /// tables were emptied, and what were written now would be found by the next step.
  std::unique_lock<std::mutex> tables_of(std::uint32_t step) const;
  void forget_locked(Leftovers& leftovers);
  void fail_locked(Failure failure, Leftovers& leftovers);

  // frame.cpp
  std::shared_ptr<Frame> open_frame(const Instruction& by);
  void close_frame(const std::shared_ptr<Frame>& frame);
  void frame_done(FrameId id);
  Frame& here() const;

  // messages.cpp
  void receive(int source, Message message);
  void take(int source, Message message);
  bool keep_early(std::uint32_t step, int source, Message& message);
  void send(int home, const Writer& header, at::Tensor payload = {});
  void send_to_others(const Writer& header);
  void send_value(std::uint32_t step, int home, ValueId id, const at::Tensor& x);
  void flush_releases();
  void peer_left(int rank, std::uint32_t completed_steps, const std::string& reason);
  Failure as_of_now(Failure left) const;

  // watchdog.cpp
  void made_progress();
  void watch();
  std::vector<std::optional<RankStatus>> ask_all();

  // executor.cpp: which instruction runs when
  void run_executor();
  void start_executor();
  void pass_releases_on();
  void execute(const Instruction& instruction);
  void store(std::uint32_t step, ValueId id, at::Tensor data);
  void store(std::uint32_t step, ValueId id, std::shared_ptr<CallRecord> record);
  at::Tensor borrow(Frame& frame, ValueId id, const TensorMeta& meta);
  at::Tensor value(ValueId id) const;
  std::string where(const Instruction& instruction) const;
  int partition_of(int rank) const;
  void reply(const Instruction& to, ValueId id, const std::string& bytes);

  // run_instruction.cpp: what each does
  void run(const Instruction& instruction, const Call& call);
  void run(const Instruction& instruction, const Op& op);
  void run(const Instruction& instruction, const Backward& backward);
  void run(const Instruction& instruction, const Lift& lift);
  void run(const Instruction& instruction, const Accumulate& accumulate);
  void run(const Instruction& instruction, const Send& send);
  void run(const Instruction& instruction, const Alias& alias);
  void run(const Instruction& instruction, const End& end);
  void run(const Instruction& instruction, const Close& close);
  std::vector<at::Tensor> run_autograd(const Instruction& instruction, CallRecord& record,
                                       std::vector<at::Tensor> gradients, std::int64_t pass, bool keep_graph,
                                       bool accumulate);

  // issue.cpp
  at::Tensor lift(const at::Tensor& x, int home);
  at::Tensor move(const at::Tensor& x, int home);

  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<Host> host_;
  EngineOptions options_;
  int partition_ = 0;
  int num_threads_ = 1;         // for the operators of this rank: those of the thread that made the engine
  bool nested_frames_ = false;  // a container away from partition 0: its frames may use any rank
  std::unordered_map<const c10::TensorImpl*, int> parameter_index_;
  std::vector<std::vector<int>> shared_;  // of each module's parameters, those that other modules have too
  GradientSums sums_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  ValueTable values_;
  Lanes lanes_;
  std::shared_ptr<ReleaseQueue> releases_ = std::make_shared<ReleaseQueue>();
  std::unordered_map<FrameId, std::shared_ptr<Frame>> frames_;
  std::unordered_map<ValueId, std::string> replies_;
  std::atomic<std::uint64_t> counter_{1};

  std::mutex receive_mutex_;                    // taken before mutex_
  std::vector<std::pair<int, Message>> early_;  // of a step that this rank has not entered, in the order they came

  std::uint32_t entered_step_ = 0;
  bool in_step_ = false;
  int open_microbatches_ = 0;
  std::map<std::uint32_t, std::string> begun_steps_;
  std::map<std::uint32_t, std::string> ended_steps_;
  std::atomic<std::uint32_t> failed_step_{0};              // the last that failed; written under the lock
  std::optional<Failure> failure_;                         // of the step that this rank is in, or was in last
  std::optional<std::pair<std::uint32_t, Failure>> left_;  // a peer that ended, after so many steps
  std::shared_ptr<Frame> microbatch_frame_;
  std::optional<FrameScope> microbatch_scope_;
  std::optional<StreamScope> microbatch_stream_;
  std::uint64_t step_key_ = 0;
  std::optional<RandomState> script_random_;  // of the code between steps, while a step runs
  std::string step_name_;
  std::int64_t step_began_ns_ = 0;
  std::int64_t microbatch_began_ns_ = 0;

  std::unordered_map<std::string, CallReport> reports_;
  std::string frozen_;  // requires_grad of every parameter when reports_ were made
  std::map<std::pair<std::int32_t, std::uint64_t>, std::int64_t> tickets_;  // the next, by module and context

  struct Running {
    const Instruction* instruction;
    std::int64_t began_ns;
  };
  std::vector<Running> running_;
  std::atomic<std::int64_t> progress_ns_{0};
  std::atomic<std::int64_t> next_question_ns_{0};  // when watch() may ask the other ranks again
  std::uint64_t status_serial_ = 0;
  std::unordered_map<int, RankStatus> answers_;  // by partition, to the request of that serial

  std::vector<std::thread> executors_;
  int idle_executors_ = 0;
  int resuming_ = 0;
  bool computing_ = false;
  bool stopping_ = false;
  bool closed_ = false;
  EngineCounts counts_;
  LiveMicrobatches live_;
};

}  // namespace smp::pipeline
