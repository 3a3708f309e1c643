// The process's worker threads: the caller of a piece of work is one of those that do it.
#pragma once

// Calls work(argument, number) with number 0 here and 1, 2, ... on up to threads - 1 workers at the same time, and
// returns when all have. Workers may come late or, while another call has them, not at all: work shares out what is
// to do by itself, and number 0 must be able to do all of it.
void run_on_threads(int threads, void (*work)(void* argument, int number), void* argument);

constexpr int kMostThreads = 256;
