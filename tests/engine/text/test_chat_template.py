"""Chat templates: what they are given, what they may do, and what is said when they fail."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.catalog import resolve_model
from engine.errors import ChatTemplateError
from engine.text import chat_template, template_sandbox
from engine.text.chat_template import ChatTemplate

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}\n"
    "{%- endif %}\n"
)
USER = [{"role": "user", "content": "hi"}]


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens)


def test_a_chat_becomes_a_prompt():
    assert template(CHATML).render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_generation_prompt_can_be_left_out():
    assert template(CHATML).render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_variables_reach_the_template():
    assert template(CHATML).render(USER, variables={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")


def test_variables_cannot_replace_the_messages():
    assert "hi" in template(CHATML).render(USER, variables={"messages": []})


def test_text_parts_are_joined_by_newlines():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo<|im_end|>" in template(CHATML).render([{"role": "user", "content": parts}])


def test_a_part_that_is_not_text_is_named():
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ChatTemplateError, match="image_url"):
        template(CHATML).render([{"role": "user", "content": parts}])


def test_the_caller_s_messages_are_left_alone():
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    template(CHATML).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "one"}]}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'a': 'é<'} | tojson(indent=1) }}", '{\n "a": "é<"\n}'),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{{ tools is none }}", "True"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_templates_find_what_hugging_face_gives_them(source, expected):
    assert template(source, bos_token="<s>", eos_token="</s>").render(USER) == expected
    theirs, _ = render_jinja_template([USER], chat_template=source, bos_token="<s>", eos_token="</s>")
    assert theirs == [expected]


@pytest.mark.parametrize(
    ("source", "line", "says"),
    [
        ("\n\n{{ raise_exception('roles must alternate') }}", 3, "roles must alternate"),
        ("\n{{ messages[9].content }}", 2, "no element 9"),
        ("{{ nothing.at.all }}", 1, "'nothing' is undefined"),
        ("\n{{ messages[0].__class__.__mro__ }}", 2, "unsafe"),
        ("{{ messages.append(1) }}", 1, "unsafe"),
        ("{{ 'a' * 1000000000 }}", 1, "too large"),
        ("{{ 10 ** 100000000 }}", 1, "too large"),
        ("{% for i in range(10000000) %}{% endfor %}", 1, "Range too big"),
    ],
)
def test_a_failing_template_says_where_and_why(source, line, says):
    with pytest.raises(ChatTemplateError, match=rf"line {line}: .*{says}"):
        template(source).render(USER)


def test_a_broken_template_is_refused_with_its_line():
    with pytest.raises(ChatTemplateError, match="line 2"):
        template("\n{% if %}")


@pytest.mark.parametrize(
    ("limits", "says"), [({"max_characters": 999}, "longer than 999"), ({"max_seconds": 0.0}, "more than 0 seconds")]
)
def test_output_and_time_are_bounded(monkeypatch, limits, says):
    bounded = template_sandbox.TemplateLimits(**limits)
    monkeypatch.setattr(chat_template, "TemplateLimits", lambda: bounded)
    with pytest.raises(ChatTemplateError, match=says):
        template("{% for i in range(1000) %}{{ i }}{% endfor %}").render(USER)


def test_a_template_file_wins_over_the_config(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert ChatTemplate.load(tmp_path).render(USER) == "file"


def test_the_config_s_special_tokens_reach_the_template(tmp_path):
    config = {"chat_template": "{{ eos_token }}", "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(USER) == "<|im_end|>"


@pytest.mark.parametrize(("tools", "expected"), [(None, "plain"), ([{"type": "function"}], "tools")])
def test_named_templates_are_picked_by_use(tmp_path, tools, expected):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(USER, tools=tools) == expected


def test_a_checkpoint_without_a_template_has_none(tmp_path):
    assert ChatTemplate.load(tmp_path) is None


@pytest.mark.parametrize("broken", [3, [3], [{"name": "default"}], []])
def test_a_template_of_the_wrong_type_is_refused(tmp_path, broken):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": broken}))
    with pytest.raises(ChatTemplateError, match=r"chat.template"):
        ChatTemplate.load(tmp_path)


def called(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ PART }}]{% endfor %}{% endfor %}"
OBJECTS_ONLY = "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
EITHER = "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
IN_SILENCE = "{% if c.function.arguments is mapping %}" + OBJECTS_ONLY + "{% endif %}"


@pytest.mark.parametrize(
    ("part", "expected"),
    [(OBJECTS_ONLY, '[arguments={"x": ]'), (EITHER, '[{"x": ]'), (IN_SILENCE, '[arguments={"x": ]')],
)
def test_arguments_that_are_text_are_written_by_every_template(part, expected):
    written = template(CALLS.replace("{{ PART }}", part))
    assert written.render(called('{"x": ')) == expected
    assert "x" in written.render(called({"x": 1}))


def test_arguments_that_are_text_are_written_by_the_bundled_template():
    bundled = ChatTemplate.load(resolve_model("demo"))
    assert '<function=f>\n<parameter=arguments>\n{"x": \n</parameter>\n' in bundled.render(called('{"x": '))


def test_an_integer_beyond_64_bits_is_written_whole():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}
    bundled = ChatTemplate.load(resolve_model("demo"))
    assert '"maximum": 1000000000000000000000000000000}' in bundled.render(USER, tools=[tool])
    assert "\n-18446744073709551617\n" in bundled.render(called({"x": -(2**64) - 1}))
