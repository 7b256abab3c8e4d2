// Random numbers that do not depend on timing: streams, and keys from which streams are seeded.
//
// A stream is a generator. The step function of a microbatch has one of its own, seeded from the step's key. A CALL
// takes a key from the stream of whoever issues it, and runs with the default generators of its rank seeded with that;
// so its code, which finds what it expects in torch.get_rng_state(), draws the same numbers whenever it runs.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace smp {

/// A key for something numbered within what has `key`. Different for every pair of arguments, for practical purposes.
std::uint64_t mix(std::uint64_t key, std::uint64_t number);

/// The next 64 bits of the stream of this thread: its own (see StreamScope), else the CPU's default generator.
std::uint64_t draw_key();

/// The generator that is this thread's stream, undefined where the default ones are.
at::Generator own_stream();

/// Do the operators of this thread draw apart (see StreamScope)?
bool draws_apart();

/// A generator that code draws from by name: ReplayableRandom keeps its state too. Does nothing the second time.
void register_generator(const at::Generator& generator);

/// The states of some generators, to come back to.
class RandomState {
 public:
  RandomState() = default;
  static RandomState of_defaults();  ///< of the CPU, and of this process's accelerator where it is in use
  static RandomState of_stream();    ///< of the stream of this thread
  static RandomState of_all();       ///< of all devices in use, and registered generators
  void restore() const;
  [[nodiscard]] bool has_moved() const;

 private:
  explicit RandomState(std::vector<at::Generator> generators);
  std::vector<std::pair<at::Generator, at::Generator>> saved_;  // and a copy of it
};

/// What code that draws numbers starts from, to draw the same ones again later, on whatever thread: the stream of the
/// thread, the default generators of all devices in use, and registered generators.
class ReplayableRandom {
 public:
  ReplayableRandom();  ///< of now

  /// Starts from there again for a scope, which leaves all generators as it found them.
  class Scope;

  /// Has anything been drawn since?
  [[nodiscard]] bool has_moved() const;

 private:
  at::Generator own_;  // a copy of the thread's stream; undefined where that is the default generator
  bool apart_;
  RandomState state_;
};

/// Where the random operators of this thread take their numbers from, for a scope, unless they are given a generator.
class StreamScope {
 public:
  /// `own`: the stream of this thread; undefined: the default generators. `apart`: each operator takes a key from the
  /// stream and draws from a generator of that, so that it takes one step of the stream wherever it runs.
  StreamScope(at::Generator own, bool apart);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  at::Generator own_before_;
  bool apart_before_;
};

class ReplayableRandom::Scope {
 public:
  explicit Scope(const ReplayableRandom& from);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  StreamScope stream_;
  RandomState before_;
};

/// A generator of the CPU.
at::Generator make_stream(std::uint64_t key);

/// Seeds the default generators of the CPU, and of this process's accelerator where it is in use.
void seed_defaults(std::uint64_t key);

/// In a scope whose operators draw apart, a module takes a key from the stream, and until leave_module() draws from
/// what that seeds. So it leaves the stream of its caller one step further on, wherever it runs and whatever it draws.
/// In other scopes neither does anything. A pair belongs to one thread.
void enter_module();
void leave_module();

}  // namespace smp
