// SPDX-License-Identifier: Apache-2.0
// A body in a process of its own.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace moec::test {

// Exit status of `body` in a forked child that is killed after 20 s; 128 + signal if it died of
// one.
inline int in_child(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    _exit(body());
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace moec::test
