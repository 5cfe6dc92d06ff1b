"""Which keys a config.json may have: those that are read, and those that change no output.

All others are refused. One that nobody here knows may scale, cap or mask something, and a model
that computes something else loads and talks as if nothing were wrong.
"""

from pathlib import Path
from typing import Any

from twell_jax.models.pretrained.architectures import Architecture, words
from twell_jax.models.pretrained.json_file import PretrainedError, unsupported

_NAMED = 5  # of the keys that an error counts

# Keys for which the model supports these values alone; the first is the default.
_FIXED: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
    "num_experts": (None, 0),
    "sparse_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
}

# Those that are read whatever the architecture, beside the ones for which that has a value.
_READ = words(
    """
    model_type dtype torch_dtype layer_types quantization_config eos_token_id live_neurons
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act_param
    rope_theta rope_scaling rope_parameters original_max_position_embeddings partial_rotary_factor
    sparsity_gated_mlp sparsity_new_intermediate_size
    """
)
_OF_SCALED = words("scale_emb scale_depth dim_model_base")

# Those that say how a model was made, trained, stored or sampled from. Others speak of shapes that
# the tensors have anyway (kv_channels), or of a window or of experts that `_FIXED` excludes.
_HARMLESS = words(
    """
    architectures auto_map custom_pipelines finetuning_task is_llama_config model_name name_or_path
    problem_type task_specific_params tokenizer_class transformers_version transformers.js_config
    unsloth_fixed unsloth_version _commit_hash _name_or_path
    _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled attn_implementation
    bos_token_id cls_token_id decoder_start_token_id mask_token_id pad_token_id sep_token_id
    unk_token_id prefix
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout embd_pdrop
    hidden_dropout hidden_dropout_prob resid_pdrop gradient_checkpointing
    id2label label2id num_labels
    cross_attention_hidden_size is_decoder tf_legacy_loss tie_encoder_decoder
    chunk_size_feed_forward output_attentions output_hidden_states output_scores return_dict
    return_dict_in_generate torchscript use_bfloat16 use_cache use_return_dict
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences remove_invalid_values repetition_penalty suppress_tokens
    temperature top_k top_p typical_p
    kv_channels max_sequence_length max_window_layers num_experts_per_tok
    """
)


def check(path: Path, tree: dict[str, Any], architecture: Architecture) -> None:
    """Refuses what a config.json says that would not be computed.

    A key that is null is passed over, whatever its name: it asks for nothing.

    Args:
      path: of the file, for messages.
      tree: its content.
      architecture: that of its `model_type`.

    Raises:
      PretrainedError: a key has a value that is not supported, or is not known. The line names it.
    """
    for key, values in _FIXED.items():
        if tree.get(key, values[0]) not in values:
            raise unsupported(path, key, tree[key], values)
    known = _READ | _HARMLESS | _FIXED.keys() | architecture.ignored
    known |= architecture.defaults.keys() | architecture.always.keys()
    if architecture.scaled:
        known |= _OF_SCALED
    require_known(path, "", tree, known)


def require_known(path: Path, where: str, tree: dict[str, Any], known: frozenset[str]) -> None:
    """Refuses keys of an object in config.json that are neither known nor null.

    Args:
      path: of config.json, for messages.
      where: what stands before the keys in messages, such as "rope_scaling.".
      tree: the object.
      known: its keys that are read or that change no output.

    Raises:
      PretrainedError: there are others. The line names the first few.
    """
    if unknown := [key for key, value in tree.items() if value is not None and key not in known]:
        named = ", ".join(where + repr(key)[1:-1][:80] for key in unknown[:_NAMED])
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        raise PretrainedError(
            f"{path}: {named}{more}: not known, and may change what the model computes; remove "
            "what does not from the file"
        )
