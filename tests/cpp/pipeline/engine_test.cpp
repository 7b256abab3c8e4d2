// Steps over two and three ranks give the bits of the plain loop over microbatches.
#include "engine_fixture.h"

#include <atomic>

namespace smp::pipeline {
namespace {

/// A step that sends a batch through modules, one after another.
StepBody chain(const std::vector<std::string>& modules, Tensors data) {
  return [modules, data = std::move(data)](Model& model, int microbatch) {
    auto x = data[static_cast<std::size_t>(microbatch)];
    for (const auto& name : modules) {
      x = model(name, x);
    }
    const auto loss = loss_of(x);
    loss.backward();
    return Tensors{loss, x};
  };
}

class EngineStep : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(7); }
  ModelSpec spec_;
};

TEST_F(EngineStep, a_chain_over_two_ranks_equals_the_plain_loop) {
  spec_.block("a", 0).block("b", 0).block("c", 1).block("d", 1);
  expect_equals_plain(spec_, 2, chain({"a", "b", "c", "d"}, batches(6)), 6);
}

TEST_F(EngineStep, a_chain_over_three_ranks_equals_the_plain_loop) {
  spec_.block("a", 0).block("b", 1).block("c", 2);
  expect_equals_plain(spec_, 3, chain({"a", "b", "c"}, batches(8)), 8);
}

TEST_F(EngineStep, one_microbatch_is_enough) {
  spec_.block("a", 0).block("b", 1).block("c", 2);
  expect_equals_plain(spec_, 3, chain({"a", "b", "c"}, batches(1)), 1);
}

TEST_F(EngineStep, one_rank_alone_equals_the_plain_loop) {
  spec_.block("a", 0).block("b", 0);
  expect_equals_plain(spec_, 1, chain({"a", "b"}, batches(3)), 3);
}

TEST_F(EngineStep, modules_may_go_back_and_forth_between_ranks) {
  spec_.block("a", 0).block("b", 1).block("c", 0).block("d", 2).block("e", 1).block("f", 0);
  expect_equals_plain(spec_, 3, chain({"a", "b", "c", "d", "e", "f"}, batches(5)), 5);
}

TEST_F(EngineStep, no_module_needs_to_live_on_the_first_rank) {
  spec_.block("a", 1).block("b", 1);
  expect_equals_plain(spec_, 2, chain({"a", "b"}, batches(3)), 3);
}

TEST_F(EngineStep, containers_may_nest_with_homes_0_1_0_1) {
  spec_.block("leaf", 1).block("at_0", 0).block("at_1", 1);
  spec_.module({"third",
                0,
                [](Model& model, const Tensors& in) { return Tensors{model("leaf", model("at_0", in[0])) + in[0]}; },
                {},
                {"leaf", "at_0"}});
  spec_.module({"second",
                1,
                [](Model& model, const Tensors& in) { return Tensors{model("third", model("at_1", in[0])) * 2}; },
                {},
                {"third", "at_1"}});
  expect_equals_plain(spec_, 2, chain({"at_0", "second", "leaf"}, batches(5)), 5);
}

TEST_F(EngineStep, containers_may_nest_over_three_ranks) {
  spec_.block("leaf", 0).block("mid", 1).block("end", 2);
  spec_.module({"inner",
                1,
                [](Model& model, const Tensors& in) {
                  return Tensors{model("end", model("leaf", in[0])) + model("mid", in[0])};
                },
                {},
                {"leaf", "mid", "end"}});
  spec_.module({"outer",
                2,
                [](Model& model, const Tensors& in) { return model.call("inner", {at::sin(model("inner", in[0]))}); },
                {},
                {"inner"}});
  expect_equals_plain(spec_, 3, chain({"leaf", "outer", "end"}, batches(5)), 5);
}

TEST_F(EngineStep, a_module_may_be_used_twice_in_a_microbatch) {
  spec_.block("a", 0).block("b", 1);
  expect_equals_plain(spec_, 2, chain({"a", "b", "a", "b"}, batches(4)));
}

TEST_F(EngineStep, modules_without_parameters_run_where_their_data_lies) {
  spec_.block("a", 0).block("b", 1);
  spec_.module({"relu", kFollowsData, [](Model&, const Tensors& in) { return Tensors{at::relu(in[0])}; }});
  expect_equals_plain(spec_, 2, chain({"a", "relu", "b", "relu"}, batches(4)));
}

TEST_F(EngineStep, an_unused_input_gets_no_gradient) {
  spec_.block("used", 0).block("unused", 0);
  spec_.module({"first", 1, [](Model&, const Tensors& in) { return Tensors{in[0] * 2, in[1].detach()}; }});
  expect_equals_plain(spec_, 2, [data = batches(4)](Model& model, int i) {
    const auto& x = data[static_cast<std::size_t>(i)];
    const auto out = model.call("first", {model("used", x), model("unused", x)});
    const auto loss = loss_of(out[0]);
    loss.backward();
    EXPECT_FALSE(out[1].requires_grad());
    return Tensors{loss};
  });
}

TEST_F(EngineStep, an_unused_output_is_no_harm) {
  spec_.block("a", 0);
  spec_.module({"two", 1, [](Model&, const Tensors& in) {
                  return Tensors{in[0] * 2, at::exp(in[0]), at::argmax(in[0], 1)};
                }});
  expect_equals_plain(spec_, 2, [data = batches(4)](Model& model, int i) {
    const auto out = model.call("two", {model("a", data[static_cast<std::size_t>(i)])});
    const auto loss = loss_of(out[1]);
    loss.backward();
    return Tensors{loss, out[2]};
  });
}

TEST_F(EngineStep, retain_graph_allows_a_second_backward) {
  spec_.block("a", 0).block("b", 1);
  expect_equals_plain(spec_, 2, [data = batches(4)](Model& model, int i) {
    const auto loss = loss_of(model("b", model("a", data[static_cast<std::size_t>(i)])));
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return Tensors{loss};
  });
}

TEST_F(EngineStep, two_losses_may_share_a_part_of_the_graph) {
  spec_.block("a", 0).block("b", 1).block("c", 1);
  expect_equals_plain(spec_, 2, [data = batches(4)](Model& model, int i) {
    const auto h = model("a", data[static_cast<std::size_t>(i)]);
    const auto first = loss_of(model("b", h));
    const auto second = model("c", h).sum();
    first.backward({}, /*retain_graph=*/true);
    second.backward();
    return Tensors{first, second};
  });
}

TEST_F(EngineStep, without_grad_mode_nothing_is_kept) {
  spec_.block("a", 0).block("b", 1);
  std::atomic<std::size_t> calls_kept{0};
  const auto body = [data = batches(4)](Model& model, int i) {
    const c10::NoGradGuard no_grad;
    const auto y = model("b", model("a", data[static_cast<std::size_t>(i)]));
    EXPECT_FALSE(y.requires_grad());
    return Tensors{y};
  };
  expect_equals_plain(spec_, 2, body);
  Cluster cluster(spec_, 2);
  cluster.model(1).on_call = [&](const std::string&) { calls_kept += cluster.engine(1).state().calls; };
  cluster.step(body, 4);
  EXPECT_EQ(calls_kept, 0U);
}

TEST_F(EngineStep, a_step_may_give_local_tensors_and_values_of_any_rank) {
  spec_.block("a", 0).block("b", 1);
  expect_equals_plain(
      spec_, 2,
      [data = batches(3)](Model& model, int i) {
        const c10::NoGradGuard no_grad;
        const auto& x = data[static_cast<std::size_t>(i)];
        const auto a = model("a", x);
        const auto b = model("b", a);
        return Tensors{x, a, b, b.t(), b.slice(0, 0, 0), (b > 0), b.expand({2, 3, 6}), b.to(at::kBFloat16)};
      },
      3);
}

TEST_F(EngineStep, calls_of_modules_with_buffers_keep_the_order_of_microbatches) {
  spec_.block("a", 0);
  const auto average = [](Model& model, const Tensors& in) {
    auto& running = model.buffers["running"];
    const auto mean = in[0].detach().mean();
    running = running.defined() ? running * 0.9 + mean : mean;
    return Tensors{in[0] - running};
  };
  spec_.module({"norm", 1, average, {}, {}, /*ordered=*/true});
  const auto body = chain({"a", "norm", "a", "norm"}, batches(6));
  for (const auto policy : {Policy::kInterleaved, Policy::kSimple}) {
    Cluster cluster(spec_, 2, policy);
    Model plain(spec_);
    const auto expected = run_plainly(plain, body, 6);
    const auto actual = cluster.step(body, 6);
    for (std::size_t i = 0; i < 6; ++i) {
      expect_same_bits(actual[i][1], expected[i][1], "output of microbatch " + std::to_string(i));
    }
    expect_same_bits(cluster.model(1).buffers["running"], plain.buffers["running"], "buffer");
  }
}

TEST_F(EngineStep, gradients_follow_a_parameter_that_was_frozen_between_steps) {
  spec_.block("a", 0).block("b", 1);
  Cluster cluster(spec_, 2);
  Model plain(spec_);
  const auto body = chain({"a", "b"}, batches(3));
  for (const bool trainable : {true, false, true}) {
    for (auto* model : {&plain, &cluster.model(0), &cluster.model(1)}) {
      model->parameter("a.weight").set_requires_grad(trainable);
      model->parameter("a.bias").set_requires_grad(trainable);
    }
    run_plainly(plain, body, 3);
    cluster.step(body, 3);
    cluster.expect_gradients_of(plain);
  }
}

TEST_F(EngineStep, no_rank_takes_up_more_microbatches_than_the_admission_limit) {
  spec_.block("a", 0).block("b", 1).block("c", 2);
  Cluster cluster(spec_, 3);
  std::array<std::atomic<std::size_t>, 3> most_calls{};
  for (int rank = 0; rank < 3; ++rank) {
    cluster.model(rank).on_call = [&, rank](const std::string&) {
      auto& most = most_calls[static_cast<std::size_t>(rank)];
      most = std::max(most.load(), cluster.engine(rank).state().calls + 1);
    };
  }
  const auto body = chain({"a", "b", "c"}, batches(12));
  for (int step = 0; step < 3; ++step) {
    cluster.step(body, 12);
  }
  for (int rank = 0; rank < 3; ++rank) {
    const auto limit = admission_limit(Policy::kInterleaved, 0, rank, 3);
    EXPECT_LE(most_calls[static_cast<std::size_t>(rank)], static_cast<std::size_t>(limit)) << "rank " << rank;
  }
}

TEST_F(EngineStep, a_tensor_goes_to_a_rank_once_in_a_microbatch) {
  spec_.block("a", 0).block("b", 1).block("c", 1);
  Cluster cluster(spec_, 2);
  const auto body = [data = batches(3)](Model& model, int i) {
    const c10::NoGradGuard no_grad;
    const auto h = model("a", data[static_cast<std::size_t>(i)]);
    return Tensors{model("b", h).sum() + model("c", h).sum() + (model("b", h) * h).sum()};
  };
  cluster.step(body, 3);
  EXPECT_EQ(cluster.engine(0).counts().moved_values, 3);
}

}  // namespace
}  // namespace smp::pipeline
