"""Chat templates of this project's own, each with a habit of a family that people train."""

_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + _CHATML + "{% endfor %}" + _ASKS

THINKS = (  # as Qwen3: thoughts stand in the last turn alone, and an empty block where there are none
    "{% set place = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set place.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set thought = m.reasoning_content or '' %}{% set said = m.content or '' %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > place.asked and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}" + _CHATML + "{% endif %}{% endfor %}" + _ASKS.replace(
        "assistant\n", "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
)  # fmt: skip
ENDS = (  # as Phi-3: the end of the text stands where no answer is asked for
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
LATE = (  # as Mistral's: what the system says stands in the last turn of the user, and nothing asks for a turn
    "{{ bos_token }}{% set told = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if told else messages %}{% for m in rest %}{% if m.role == 'user' %}[INST] "
    "{% if told and rest[loop.index:] | selectattr('role', 'equalto', 'user') | list | length == 0 %}{{ told }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
OPENS = (  # as DeepSeek-R1: a turn is asked for with an open thought, which no finished turn shows
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
RETURNS = (  # as gpt-oss: the last turn ends with another token
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}<|return|>{% else %}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PLAIN = (  # words for signs, and one end of the text
    "{% for m in messages %}### {{ m.role | capitalize }}:\n{{ m.content | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% else %}{{ eos_token }}{% endif %}"
)
MARKED = (  # by the marks of transformers
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + _ASKS
)
PICKY = (  # as Gemma's: no system, roles alternate
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system: ' + messages[0].content) }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception(m.content) }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TOOLED = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}{% if style is defined %}<{{ style }}>{% endif %}"
    + CHATML
)
