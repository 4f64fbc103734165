// SPDX-License-Identifier: Apache-2.0
// moec/mpi.h: the ranks are the processes that mpirun started. Every rank draws the same problems,
// and compares what it got with the bits of one process that runs the ranks in sequence. It was
// seen to catch rows received at the offsets of those sent.
#include <gtest/gtest.h>
#include <moec/mpi.h>

#include <cstdlib>

#include "support/ep_problem.h"

namespace moec::test {
namespace {

struct World {
  World() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    auto desc = sized<moec_context_desc>();
    desc.num_threads = 1;
    context = make<Context>(moec_context_create, &desc);
    comm = make<Comm>(moec_comm_from_mpi, context.get(), MPI_COMM_WORLD, 60000);
  }
  int rank = 0, size = 0;
  Context context;
  Comm comm;
};

TEST(EpMpi, SameBitsAsInSequence) {
  const World world;
  Draw draw(static_cast<uint64_t>(world.size));
  for (int round = 0; round < 3; ++round)
    for (const uint32_t scheme : {MOEC_EP_GATHER, MOEC_EP_ROWS, MOEC_EP_EXACT}) {
      const EpProblem p = draw_ep_problem(world.size, scheme, draw);
      const Outputs got = run_ep_layer(p, world.rank, world.context.get(), world.comm.get());
      const Outputs want = run_in_sequence(p)[static_cast<size_t>(world.rank)];
      for (const auto& [name, bytes] : got)
        EXPECT_TRUE(bytes == want.at(name)) << name << " of rank " << world.rank;
    }
}

TEST(EpMpi, TrainsAsOneProcess) {
  const World world;
  Draw draw(17);
  const EpProblem p = training_problem(world.size, draw);
  const std::vector<double> one = train_one(p, 20);
  const std::vector<double> losses =
      train_ep(p, world.rank, world.context.get(), world.comm.get(), 20);
  ASSERT_EQ(losses.size(), one.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(losses[i], one[i], 1e-5 * one[i]) << i;
  EXPECT_LT(losses.back(), 0.95 * losses.front());
}

TEST(EpMpi, RanksThatDisagreeAreNamed) {
  const World world;
  auto desc = sized<moec_ep_desc>();
  desc.hidden = world.rank == world.size - 1 ? 5 : 4;
  desc.max_tokens = 2;
  desc.num_experts = world.size;
  desc.top_k = 1;
  desc.dtype = MOEC_F32;
  moec_ep* ep = nullptr;
  EXPECT_EQ(moec_ep_create(world.comm.get(), &desc, &ep), MOEC_E_MISMATCH);
  EXPECT_NE(last_error().find("desc.hidden"), std::string::npos) << last_error();
}

TEST(EpMpi, ARankThatDoesNotComeIsATimeout) {
  const World world;
  moec_comm* comm = nullptr;
  check(moec_comm_from_mpi(world.context.get(), MPI_COMM_WORLD, 200, &comm));
  auto desc = sized<moec_ep_desc>();
  desc.hidden = 4;
  desc.max_tokens = 2;
  desc.num_experts = world.size;
  desc.top_k = 1;
  desc.dtype = MOEC_F32;
  moec_ep* ep = nullptr;
  if (world.rank != 0) {  // rank 0 stays away
    EXPECT_EQ(moec_ep_create(comm, &desc, &ep), MOEC_E_TIMEOUT);
    EXPECT_EQ(moec_ep_create(comm, &desc, &ep), MOEC_E_TIMEOUT);
  }
  MPI_Barrier(MPI_COMM_WORLD);  // the processes live on; the comm stays, as mpi.h asks
  // What the others left open ends, so that MPI can.
  if (world.rank == 0) check(moec_ep_create(comm, &desc, &ep));
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace moec::test

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, failed = 0, any = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) GTEST_FLAG_SET(output, "");  // one report, of the name that was read before main
  testing::InitGoogleTest(&argc, argv);
  failed = RUN_ALL_TESTS();
  MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return any;
}
