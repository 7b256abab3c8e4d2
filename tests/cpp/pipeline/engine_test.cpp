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

TEST_F(EngineStep, glue_may_use_parameters_of_any_rank) {
  spec_.block("a", 0).block("b", 1).parameter("scale", at::randn({6}), 0).parameter("shift", at::randn({6}), 1);
  spec_.module({"container",
                1,
                [](Model& model, const Tensors& in) {
                  return Tensors{model("a", in[0] * model.parameter("shift")) * model.parameter("scale")};
                },
                {"scale", "shift"},
                {"a"}});
  expect_equals_plain(spec_, 2, [data = batches(4)](Model& model, int i) {
    auto x = model("a", data[static_cast<std::size_t>(i)] * model.parameter("scale")) + model.parameter("shift");
    x = model("b", model("container", x));
    const auto loss = loss_of(x);
    loss.backward();
    return Tensors{loss};
  });
}

TEST_F(EngineStep, a_weight_may_be_tied_between_ranks) {
  spec_.parameter("embed", at::randn({10, 6}), 0).block("b", 1);
  spec_.module({"embedding",
                0,
                [](Model& model, const Tensors& in) { return Tensors{at::embedding(model.parameter("embed"), in[0])}; },
                {"embed"}});
  expect_equals_plain(spec_, 2, [](Model& model, int i) {
    const auto ids = at::remainder(at::arange(8, at::kLong) * (i + 3), 10);
    const auto x = model("b", model("embedding", ids));
    const auto logits = at::matmul(x, model.parameter("embed").t());
    const auto loss = at::cross_entropy_loss(logits, ids);
    loss.backward();
    return Tensors{loss, logits};
  });
}

TEST_F(EngineStep, operators_between_ranks_run_where_the_data_lies) {
  spec_.block("a", 0).block("b", 1);
  expect_equals_plain(spec_, 2, [data = batches(4, 4)](Model& model, int i) {
    const auto h = model("a", data[static_cast<std::size_t>(i)]);
    auto y = model("b", h);
    auto view = y.view({2, 2, 6}).transpose(0, 1).reshape({4, 6});
    y = at::cat({view, h.slice(0, 0, 2)}, 0);   // operands of two ranks
    y = y.clone().mul_(2).add_(at::ones({6}));  // in place
    y = y.index({at::tensor({5, 0, 3, 3})});    // a local index
    y.select(0, 1).mul_(0.5);                   // in place through a view
    const auto parts = y.split(2, 1);           // several results
    y = parts[0] + parts[1] * parts[2];
    const auto loss = at::where(y > 0, y, y * 0.1).sum() + 3;
    loss.backward();
    return Tensors{loss, y};
  });
}

TEST_F(EngineStep, operators_may_write_through_views) {
  spec_.block("a", 1);
  expect_equals_plain(spec_, 2, [data = batches(4, 4)](Model& model, int i) {
    const auto y = model("a", data[static_cast<std::size_t>(i)]) * 1;
    y.select(0, 1).mul_(0.5);
    y.t().index_put_({at::tensor({1, 4})}, at::ones({2, 4}));
    y.slice(1, 2, 6, 2).slice(0, 1).exp_();
    const auto part = y.split(2, 1)[1];
    const auto loss = loss_of(y) + part.sum();
    loss.backward();
    return Tensors{loss, y, part};
  });
}

TEST_F(EngineStep, gradients_may_lie_in_memory_otherwise_than_their_inputs) {
  spec_.block("a", 0).block("b", 1);
  spec_.module(
      {"turn", 1, [](Model&, const Tensors& in) { return Tensors{at::cumsum(in[0].t(), 1) * at::arange(4.0)}; }});
  spec_.module({"merge", 1, [](Model&, const Tensors& in) {
                  return Tensors{at::cumsum(in[0].permute({2, 1, 0}), 0).flatten()};
                }});
  spec_.module({"spread", 1, [](Model&, const Tensors& in) { return Tensors{in[0] * in[0].t().contiguous().t()}; }});
  expect_equals_plain(spec_, 2, [data = batches(4, 4)](Model& model, int i) {
    auto h = model("b", model("a", data[static_cast<std::size_t>(i)]));
    h = model("turn", h.view({2, 2, 6}).reshape({4, 6})).view({3, 8}).flatten().view({4, 6});
    h = model("spread", h.slice(0, 0, 1).expand({4, 6}));
    h = h.unflatten(1, {2, 3}).permute({2, 0, 1}).reshape({3, 8});
    // The gradient of what merge gets can't be viewed as a matrix.
    const auto loss = loss_of(h) + loss_of(model("merge", model("b", data[0]).view({2, 2, 6})));
    loss.backward();
    return Tensors{loss, h};
  });
}

TEST_F(EngineStep, results_whose_shape_depends_on_data_are_asked_for) {
  spec_.block("a", 1);
  expect_equals_plain(spec_, 2, [data = batches(4)](Model& model, int i) {
    const auto y = model("a", data[static_cast<std::size_t>(i)]);
    const auto where = at::nonzero(y > 0);
    const auto chosen = y.masked_select(y > 0.1);
    const auto loss = chosen.sum() * static_cast<double>(where.size(0));
    loss.backward();
    return Tensors{loss, where, chosen};
  });
}

TEST_F(EngineStep, a_step_function_may_read_values) {
  spec_.block("a", 1);
  expect_equals_plain(spec_, 2, [data = batches(4)](Model& model, int i) {
    auto y = model("a", data[static_cast<std::size_t>(i)]);
    y = y.mean().item<float>() > 0 ? y * 2 : y * 3;
    const auto loss = loss_of(y);
    loss.backward();
    return Tensors{loss};
  });
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

TEST_F(EngineStep, a_module_may_change_its_argument_at_home_and_elsewhere) {
  spec_.block("at_0", 0).block("at_1", 1);
  spec_.module({"change", 1, [](Model&, const Tensors& in) { return Tensors{at::sin(in[0].mul_(2))}; }});
  spec_.module({"change_home", 0, [](Model&, const Tensors& in) { return Tensors{at::cos(in[0].add_(1))}; }});
  for (const std::string block : {"at_0", "at_1"}) {
    for (const std::string change : {"change", "change_home"}) {
      SCOPED_TRACE(block + " " + change);
      expect_equals_plain(spec_, 2, [=, data = batches(4)](Model& model, int i) {
        const auto x = model(block, data[static_cast<std::size_t>(i)]) * 1;
        const auto y = model(change, x);
        const auto loss = (x * y).sum();  // x as it is now
        loss.backward();
        return Tensors{loss, x};
      });
    }
  }
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
