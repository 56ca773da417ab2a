"""CSV files of LMBenchmark, byte by byte. The expected texts were written by pandas 3.1.1."""

import pytest

from kvbm_cli.bench.lmbenchmark.exchange import AgentAnswer, MeasuredAnswer, agentic_csv, multi_round_csv, sharegpt_csv

HEADER = "prompt_tokens,generation_tokens,ttft,generation_time,user_id,question_id,launch_time,finish_time\n"
FIRST = MeasuredAnswer(21028, 100, 0.25, 1.5, 1700000000.25, 1700000002.0)
TINY = MeasuredAnswer(21145, 7, 1e-05, 2.3e-07, 1700000100.125, 1700000100.5)
NO_TEXT = MeasuredAnswer(3, 0, 0, 0, 1700000003.0, 1700000004.0)


@pytest.mark.parametrize(
    ("sessions", "lines"),
    [
        ([(2, []), (3, [])], ""),
        (
            [(9, [FIRST, TINY]), (3, [NO_TEXT])],
            "21028,100,0.25,1.5,9,1,1700000000.25,1700000002.0\n"
            "21145,7,1e-05,2.3e-07,9,2,1700000100.125,1700000100.5\n"
            "3,0,0.0,0.0,3,1,1700000003.0,1700000004.0\n",
        ),
        ([(2, []), (3, [FIRST])], "21028.0,100.0,0.25,1.5,3,1,1700000000.25,1700000002.0\n"),
        ([(3, [NO_TEXT])], "3,0,0,0,3,1,1700000003.0,1700000004.0\n"),
        ([(2, []), (3, [NO_TEXT])], "3.0,0.0,0.0,0.0,3,1,1700000003.0,1700000004.0\n"),
    ],
    ids=["no rows", "integers", "a session without rows", "only integers", "integers and a session without rows"],
)
def test_multi_round_file(sessions, lines):
    assert multi_round_csv(sessions) == HEADER + lines


def test_sharegpt_file_is_sorted_by_launch():
    assert sharegpt_csv([TINY, FIRST]) == (
        "prompt_tokens,generation_tokens,ttft,generation_time,launch_time,finish_time\n"
        "21028,100,0.25,1.5,1700000000.25,1700000002.0\n"
        "21145,7,1e-05,2.3e-07,1700000100.125,1700000100.5\n"
    )


def test_agentic_file_quotes_texts():
    messages = "[{'role': 'user', 'name': 'agent0-0', 'content': 'hihihihihi'}, {'role': 'user'}]"
    answer = AgentAnswer(FIRST, 0, 2, messages, 'a "b"\nc')
    header = (
        "prompt_tokens,generation_tokens,ttft,generation_time,user_id,round_id,launch_time,finish_time,"
        "agentID,input,output\n"
    )
    texts = f'"{messages}","a ""b""\nc"\n'
    assert agentic_csv([(1, [answer])]) == (f"{header}21028,100,0.25,1.5,1,0,1700000000.25,1700000002.0,2,{texts}")
    assert agentic_csv([(1, [answer]), (2, [])]) == (
        f"{header}21028.0,100.0,0.25,1.5,1,0.0,1700000000.25,1700000002.0,2.0,{texts}"
    )
